-- reserve client rid name kind epoch step label block count file length desc orphan retain mutable evictable part world direct
-- copied: a pending version with its block. A copy of what another machine published passes the fence of its label. Memory is never taken before it is recorded here.
-- Returns {version, slot, segment, offset, step}; a repeated request id gets the same answer.
if stale() then return refuse('EPOCH') end
local client, rid, name, kind, epoch, step, label = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local blk, count, file, auto = ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12]), '0'
if call('EXISTS', P .. 'c:' .. client) == 0 then return refuse('UNJOINED') end
local own = call('HGETALL', P .. 'c:' .. client .. ':o')
for i = 1, #own, 2 do
  if own[i + 1] == rid then
    local f = call('HMGET', P .. 'v:' .. own[i], 'seg', 'off', 's')
    return {own[i], call('HGET', P .. 'n:' .. name, 'slot'), f[1], f[2], f[3]}
  end
end

local fence = ARGV[22] == '1' and -1 or fence_of(label)
if tonumber(epoch) < fence then return refuse('FENCED', fence) end
local n = call('HMGET', P .. 'n:' .. name, 'v', 'e', 's', 'slot', 'kind', 'by')
if n[6] then return refuse('CLAIMED', n[4], n[6]) end
if n[5] and n[5] ~= kind then return refuse('KIND', n[5]) end
if step == '' then
  auto = '1'
  step = (n[1] and n[1] ~= '0') and string.format('%d', tonumber(n[3]) + 1) or '0'
end
if n[1] and n[1] ~= '0' then
  if tonumber(epoch) < tonumber(n[2]) then return refuse('FENCED', n[2]) end
  if epoch == n[2] and tonumber(step) < tonumber(n[3]) then return refuse('STALE', n[3]) end
end

if not n[4] and call('LLEN', P .. 'slotfree') == 0
    and tonumber(call('HGET', P .. 'cfg', 'slots')) >= tonumber(call('HGET', P .. 'cfg', 'slots_max')) then
  return refuse('SLOTS')
end
local seg, off, files, quota = take_block(blk, count, file)
if not seg then return refuse('QUOTA', files, quota) end
local v = string.format('%d', call('INCR', P .. 'ver'))
call('HSET', P .. 'v:' .. v, 'st', 'p', 'name', name, 'refs', 0, 'owner', client, 'label', label, 'e', epoch, 's', step,
  'seg', seg, 'off', off, 'blk', blk, 'len', ARGV[13], 'desc', ARGV[14], 'orphan', ARGV[15], 'retain', ARGV[16],
  'mut', ARGV[17], 'evict', ARGV[18], 'part', ARGV[19], 'world', ARGV[20], 'dir', ARGV[21], 'copy', ARGV[22], 'auto', auto, 'at', NOW)
call('HSET', P .. 'c:' .. client .. ':o', v, rid)
local slot = n[4]
if not slot then
  slot = call('RPOP', P .. 'slotfree') or string.format('%d', call('HINCRBY', P .. 'cfg', 'slots', 1))
  call('HSET', P .. 'n:' .. name, 'v', 0, 'e', 0, 's', 0, 'slot', slot, 'kind', kind, 'hist', '', 'pend', 0, 'label', label)
  call('ZADD', P .. 'names', 0, name)
end
call('HINCRBY', P .. 'n:' .. name, 'pend', 1)
return {v, slot, seg, off, step}
