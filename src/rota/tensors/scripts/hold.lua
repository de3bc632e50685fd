-- hold client holder: a second holder (a forked child, whose parent's views it inherited) leases all the client does.
if stale() then return refuse('EPOCH') end
call('SADD', P .. 'clients', ARGV[4])
call('HSET', P .. 'c:' .. ARGV[4], 'id', '{}')
local leases = call('HKEYS', P .. 'c:' .. ARGV[3] .. ':l')
for _, v in ipairs(leases) do lease(ARGV[4], v, 0) end
return #leases
