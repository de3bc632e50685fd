-- members key: the members of a set. None are shown while the registry is lost: what is not in it is not garbage then.
if stale() then return refuse('EPOCH') end
return call('SMEMBERS', P .. ARGV[3])
