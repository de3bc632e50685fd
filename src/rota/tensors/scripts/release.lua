-- release client [version seq]...: end leases; one with another sequence number belongs to a newer get and stays.
if stale() then return refuse('EPOCH') end
local ended = 0
for i = 4, #ARGV, 2 do
  if call('HGET', P .. 'c:' .. ARGV[3] .. ':l', ARGV[i]) == ARGV[i + 1] then
    unlease(ARGV[3], ARGV[i])
    ended = ended + 1
  end
end
return ended
