-- abort client version...: undo pending versions of the caller; harmless for those that are gone or were committed. How many
-- it undid.
if stale() then return refuse('EPOCH') end
local undone = 0
for i = 4, #ARGV do
  if call('HEXISTS', P .. 'c:' .. ARGV[3] .. ':o', ARGV[i]) == 1 then
    abort(ARGV[i])
    undone = undone + 1
  end
end
return undone
