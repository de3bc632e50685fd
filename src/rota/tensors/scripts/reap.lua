-- reap version...: free versions in limbo that no client's file notes, as the caller found after they got there. One that
-- was leased here meanwhile stays. Returns how many were freed.
if stale() then return refuse('EPOCH') end
local freed = 0
for i = 3, #ARGV do
  local f = call('HMGET', P .. 'v:' .. ARGV[i], 'refs', 'st')
  if f[1] == '0' and f[2] == 'd' and call('SREM', P .. 'limbo', ARGV[i]) == 1 then
    free(ARGV[i])
    freed = freed + 1
  end
end
return freed
