-- ls prefix after n_max [exact]: a page of names in order, from behind `after`; `exact` 1: none may be claimed.
-- Returns for each {name, fields of the name..., fields of its current version...}; see registry.py for their order.
if stale() then return refuse('EPOCH') end
local from = ARGV[4] ~= '' and '(' .. ARGV[4] or '[' .. ARGV[3]
local names = call('ZRANGEBYLEX', P .. 'names', from, '[' .. ARGV[3] .. '\255', 'LIMIT', 0, ARGV[5])
local rows = {}
for i, name in ipairs(names) do
  local n = call('HMGET', P .. 'n:' .. name, 'v', 'slot', 'kind', 'hist', 'pend', 'label', 'by')
  if n[7] and ARGV[6] == '1' then return refuse('CLAIMED', n[2], n[7]) end
  local f = call('HMGET', P .. 'v:' .. n[1], 'e', 's', 'st', 'refs', 'owner', 'blk', 'len', 'desc', 'at', 'parts', 'mut', 'evict')
  local refs, block, length = tonumber(f[4] or '0'), tonumber(f[6] or '0'), tonumber(f[7] or '0')
  for _, part in ipairs(words(f[10])) do
    local b = call('HMGET', P .. 'v:' .. part, 'blk', 'len')
    block, length = block + tonumber(b[1]), length + tonumber(b[2])
  end
  rows[i] = {name, n[1], n[2], n[3], n[4], n[5], n[6], f[1], f[2], f[3], tostring(refs), f[5], string.format('%d', block),
    string.format('%d', length), f[8], f[9], f[10], f[11], f[12]}
end
return rows
