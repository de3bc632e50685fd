-- stock client block count file n [id version step length name]...: hand in blocks whose versions were replaced or deleted,
-- and take n spare ones of a size, fewer where the quota ends. Returns {id, segment, offset} each. A block of a client is a
-- version of its own ("s") without a name, until a version has it.
if stale() then return refuse('EPOCH') end
local client, blk, out = ARGV[3], ARGV[4], {}
if call('EXISTS', P .. 'c:' .. client) == 0 then return refuse('UNJOINED') end
for i = 8, #ARGV, 5 do
  local v = ARGV[i + 1]
  if adopt(client, ARGV[i], v, 'st', 'd', 's', ARGV[i + 2], 'len', ARGV[i + 3], 'name', ARGV[i + 4]) then reclaim(v) end
end
for i = 1, tonumber(ARGV[7]) do
  local seg, off = take_block(blk, tonumber(ARGV[5]), tonumber(ARGV[6]))
  if not seg then break end
  local v = string.format('%d', call('INCR', P .. 'ver'))
  call('HSET', P .. 'v:' .. v, 'st', 's', 'name', '', 'refs', 0, 'owner', client, 'label', '', 'e', 0, 's', 0, 'seg', seg,
    'off', off, 'blk', blk, 'len', 0, 'desc', '', 'orphan', 'keep', 'retain', 1, 'mut', 0, 'evict', 0, 'part', 0, 'world', 1,
    'dir', 1, 'copy', 0, 'auto', 0, 'at', NOW)
  call('HSET', P .. 'c:' .. client .. ':b', v, '')
  out[i] = {v, seg, off}
end
return out
