-- members key: the members of a set.
return call('SMEMBERS', P .. ARGV[3])
