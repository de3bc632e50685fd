-- dump: everything the namespace holds, as {key, type, content...} rows, as of one moment (the input of fsck).
local rows = {}
for _, key in ipairs(call('KEYS', string.gsub(P, '[%[%]%*%?\\]', '\\%0') .. '*')) do
  local kind = call('TYPE', key).ok
  local row
  if kind == 'hash' then row = call('HGETALL', key)
  elseif kind == 'set' then row = call('SMEMBERS', key)
  elseif kind == 'zset' then row = call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'list' then row = call('LRANGE', key, 0, -1)
  elseif kind == 'string' then row = {call('GET', key)} end
  if row then rows[#rows + 1] = {string.sub(key, string.len(P) + 1), kind, row} end
end
return rows
