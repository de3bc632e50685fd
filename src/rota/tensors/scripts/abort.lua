-- abort client version: undo the caller's pending version; harmless when it is gone or was committed.
if stale() then return refuse('EPOCH') end
if call('HEXISTS', P .. 'c:' .. ARGV[3] .. ':o', ARGV[4]) == 0 then return 0 end
abort(ARGV[4])
return 1
