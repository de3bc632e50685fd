-- versions name: every version of a name, those that old leases keep too, without a look at other names: {id, fields,
-- clients that lease it} each. One that nobody leases here is found while a slot, a step or limbo has it.
if stale() then return refuse('EPOCH') end
local name, found, out = ARGV[3], {}, {}
local function add(id)
  if id and id ~= '0' and not found[id] and call('HGET', P .. 'v:' .. id, 'name') == name then
    local fields = call('HGETALL', P .. 'v:' .. id)
    found[id] = {id, fields, {}}
    out[#out + 1] = found[id]
    for _, part in ipairs(words(call('HGET', P .. 'v:' .. id, 'parts'))) do add(part) end
  end
end
local n = call('HMGET', P .. 'n:' .. name, 'v', 'hist', 'slot', 'by')
if n[4] then return refuse('CLAIMED', n[3], n[4]) end
for _, id in ipairs(words((n[1] or '') .. ' ' .. (n[2] or ''))) do add(id) end
for _, id in ipairs(call('HVALS', P .. 'p:' .. name)) do add(id) end
for _, id in ipairs(call('SMEMBERS', P .. 'limbo')) do add(id) end
for _, client in ipairs(call('SMEMBERS', P .. 'clients')) do
  for _, id in ipairs(call('HKEYS', P .. 'c:' .. client .. ':o')) do add(id) end
  for _, id in ipairs(call('HKEYS', P .. 'c:' .. client .. ':l')) do
    add(id)
    if found[id] then table.insert(found[id][3], client) end
  end
end
return out
