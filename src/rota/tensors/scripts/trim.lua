-- trim before_ms n_max: take files that have been wholly free since then out of the registry; the caller unlinks them
-- and strikes them from the trash.
if stale() then return refuse('EPOCH') end
local segs = call('ZRANGEBYSCORE', P .. 'idle', '-inf', ARGV[3], 'LIMIT', 0, ARGV[4])
local gone, lists = {}, {}
for _, seg in ipairs(segs) do
  local s = call('HMGET', P .. 's:' .. seg, 'blk', 'file')
  gone[seg], lists[s[1]] = true, true
  if call('GET', P .. 'cur:' .. s[1]) == seg then call('DEL', P .. 'cur:' .. s[1]) end
  call('DEL', P .. 's:' .. seg)
  call('SREM', P .. 'segs', seg)
  call('ZREM', P .. 'idle', seg)
  call('HINCRBY', P .. 'bytes', 'files', -tonumber(s[2]))
  call('SADD', P .. 'trash', seg)
end
for blk, _ in pairs(lists) do  -- once through each list, whatever the number of files
  local key, rest = P .. 'free:' .. blk, {}
  for _, item in ipairs(call('LRANGE', key, 0, -1)) do
    if not gone[string.match(item, '%S+')] then rest[#rest + 1] = item end
  end
  call('DEL', key)
  for i = 1, #rest, 1000 do call('RPUSH', key, unpack(rest, i, math.min(i + 999, #rest))) end
end
return segs
