-- delete name slot expected idle label epoch: take the name away; readers keep their bytes. `slot` is where the caller
-- believes the name, and holds the lock of: it may have been deleted and made anew since. `expected` is a version id or ''
-- (any), `idle` 1 refuses while any lease exists, and a fence on `label` (unless '') refuses an older `epoch`. Prepared
-- parts go too; a pending publish may still create the name anew. Returns {last version, publishes on their way}.
if stale() then return refuse('EPOCH') end
local name, slot, expected = ARGV[3], ARGV[4], ARGV[5]
local fence = fence_of(ARGV[7])
if tonumber(ARGV[8]) < fence then return refuse('FENCED', fence) end
local n = call('HMGET', P .. 'n:' .. name, 'v', 'hist', 'slot', 's', 'by')
if n[5] then return refuse('CLAIMED', n[3], n[5]) end
local parts = call('HVALS', P .. 'p:' .. name)
if not n[1] or (n[1] == '0' and #parts == 0) then return refuse('NOTFOUND') end
if n[3] ~= slot or (expected ~= '' and n[1] ~= expected) then return refuse('CHANGED', n[1], n[3]) end
local all = words(n[2])
if n[1] ~= '0' then table.insert(all, 1, n[1]) end
if ARGV[6] == '1' then
  for _, id in ipairs(all) do
    if call('HGET', P .. 'v:' .. id, 'refs') ~= '0' then return refuse('LEASED') end
  end
end
call('HSET', P .. 'n:' .. name, 'v', 0, 'e', 0, 's', 0, 'hist', '')
call('HDEL', P .. 'n:' .. name, 'pe')
call('ZREM', P .. 'evict', name)
for _, id in ipairs(all) do doom(id) end
for _, id in ipairs(parts) do abort(id) end
event('deleted', name, n[1], n[4])
local pend = call('HGET', P .. 'n:' .. name, 'pend') or '0'
forget_if_empty(name)
return {n[1], pend}
