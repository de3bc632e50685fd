-- begin epoch slots_max ver slots run: open an empty namespace under a registry epoch (the last step of a recovery too).
-- `run` is the id of this run of the server: what another run left is not trusted.
if call('HEXISTS', P .. 'cfg', 'epoch') == 1 then return call('HGET', P .. 'cfg', 'epoch') end
call('HSET', P .. 'cfg', 'epoch', ARGV[3], 'slots_max', ARGV[4], 'slots', ARGV[6], 'run', ARGV[7])
if call('EXISTS', P .. 'ver') == 0 or tonumber(call('GET', P .. 'ver')) < tonumber(ARGV[5]) then call('SET', P .. 'ver', ARGV[5]) end
return ARGV[3]
