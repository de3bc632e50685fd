-- own client: the publishes of a client on their way: {version, segment, offset} each.
if stale() then return refuse('EPOCH') end
local out = {}
for i, v in ipairs(call('HKEYS', P .. 'c:' .. ARGV[3] .. ':o')) do
  local f = call('HMGET', P .. 'v:' .. v, 'seg', 'off')
  out[i] = {v, f[1] or '', f[2] or '0'}
end
return out
