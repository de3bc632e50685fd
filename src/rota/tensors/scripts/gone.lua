-- gone version...: which of these versions have been freed.
if stale() then return refuse('EPOCH') end
local out = {}
for i = 3, #ARGV do
  if call('EXISTS', P .. 'v:' .. ARGV[i]) == 0 then out[#out + 1] = ARGV[i] end
end
return out
