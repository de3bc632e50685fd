-- config [key value]...: set settings of the namespace; returns all of them.
if stale() then return refuse('EPOCH') end
for i = 3, #ARGV, 2 do call('HSET', P .. 'cfg', ARGV[i], ARGV[i + 1]) end
return call('HGETALL', P .. 'cfg')
