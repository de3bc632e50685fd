-- fence label epoch: refuse writers of this label, and of labels below it, whose epoch is lower. Never goes back.
if stale() then return refuse('EPOCH') end
local now_at = tonumber(call('HGET', P .. 'fence', ARGV[3]) or '-1')
if tonumber(ARGV[4]) > now_at then call('HSET', P .. 'fence', ARGV[3], ARGV[4]) end
return math.max(now_at, tonumber(ARGV[4]))
