-- strike segment...: these files are unlinked now.
for i = 3, #ARGV do call('SREM', P .. 'trash', ARGV[i]) end
return #ARGV - 2
