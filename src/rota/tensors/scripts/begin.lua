-- begin epoch slots_max ver slots run filling: open an empty namespace under a registry epoch (the last step of a recovery too).
-- `run` is the id of this run of the server: what another run left is not trusted. `filling` is the mark that was written
-- before the content; without it some of that was lost meanwhile.
if call('HEXISTS', P .. 'cfg', 'epoch') == 1 then return call('HGET', P .. 'cfg', 'epoch') end
if call('HGET', P .. 'cfg', 'filling') ~= ARGV[8] then return refuse('EPOCH') end
call('HDEL', P .. 'cfg', 'filling')
call('HSET', P .. 'cfg', 'epoch', ARGV[3], 'slots_max', ARGV[4], 'slots', ARGV[6], 'run', ARGV[7])
if call('EXISTS', P .. 'ver') == 0 or tonumber(call('GET', P .. 'ver')) < tonumber(ARGV[5]) then call('SET', P .. 'ver', ARGV[5]) end
return ARGV[3]
