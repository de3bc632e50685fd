-- claims client: what a client puts by itself, as {name, slot, first id} each, and its blocks, as {id, segment, offset,
-- block} each.
if stale() then return refuse('EPOCH') end
local names, blocks = {}, {}
for i, name in ipairs(call('HKEYS', P .. 'c:' .. ARGV[3] .. ':n')) do
  local n = call('HMGET', P .. 'n:' .. name, 'slot', 'claim')
  names[i] = {name, n[1], n[2]}
end
for i, v in ipairs(call('HKEYS', P .. 'c:' .. ARGV[3] .. ':b')) do
  local f = call('HMGET', P .. 'v:' .. v, 'seg', 'off', 'blk')
  blocks[i] = {v, f[1], f[2], f[3]}
end
return {names, blocks}
