-- trim before_ms n_max: take files that have been wholly free since then out of the registry; the caller unlinks them
-- and strikes them from the trash.
if stale() then return refuse('EPOCH') end
local segs = call('ZRANGEBYSCORE', P .. 'idle', '-inf', ARGV[3], 'LIMIT', 0, ARGV[4])
for _, seg in ipairs(segs) do
  local s = call('HMGET', P .. 's:' .. seg, 'blk', 'count', 'file')
  local key = P .. 'free:' .. s[1]
  if s[2] == '1' then
    call('LREM', key, 1, seg .. ' 0')
  else
    local others = {}
    for _, item in ipairs(call('LRANGE', key, 0, -1)) do
      if string.match(item, '%S+') ~= seg then others[#others + 1] = item end
    end
    call('DEL', key)
    for _, item in ipairs(others) do call('RPUSH', key, item) end
  end
  if call('GET', P .. 'cur:' .. s[1]) == seg then call('DEL', P .. 'cur:' .. s[1]) end
  call('DEL', P .. 's:' .. seg)
  call('SREM', P .. 'segs', seg)
  call('ZREM', P .. 'idle', seg)
  call('HINCRBY', P .. 'bytes', 'files', -tonumber(s[3]))
  call('SADD', P .. 'trash', seg)
end
return segs
