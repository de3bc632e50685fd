-- touch name: notify watchers that a tensor was written in place.
if stale() then return refuse('EPOCH') end
local n = call('HMGET', P .. 'n:' .. ARGV[3], 'v', 's', 'slot', 'by')
if n[4] then return refuse('CLAIMED', n[3], n[4]) end
if not n[1] or n[1] == '0' then return refuse('NOTFOUND') end
call('HSET', P .. 'v:' .. n[1], 'at', NOW)
event('touched', ARGV[3], n[1], n[2])
return n[1]
