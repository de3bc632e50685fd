-- check label epoch: refuse when the label, or one above it, is fenced at a later epoch.
if stale() then return refuse('EPOCH') end
local fence = fence_of(ARGV[3])
if tonumber(ARGV[4]) < fence then return refuse('FENCED', fence) end
return 1
