-- get client seq [name selector]...: lease one version of each name, all or none, as of one moment.
-- Selector: '' current, v<id> exactly (h<id>: the caller saw that a client's file notes it), s<step> the one with that step, m<step> / w<id> current if at least that.
-- Returns a row_of each.
if stale() then return refuse('EPOCH') end
local client, seq, found, rows = ARGV[3], ARGV[4], {}, {}
if call('EXISTS', P .. 'c:' .. client) == 0 then return refuse('UNJOINED') end
for i = 5, #ARGV, 2 do
  local name, mode, arg = ARGV[i], string.sub(ARGV[i + 1], 1, 1), tonumber(string.sub(ARGV[i + 1], 2))
  local n = call('HMGET', P .. 'n:' .. name, 'v', 's', 'slot', 'hist', 'by')
  if n[5] then return refuse('CLAIMED', n[3], n[5], i) end
  local pick = nil
  if mode == 'v' or mode == 'h' then
    local id = string.sub(ARGV[i + 1], 2)
    local f = call('HMGET', P .. 'v:' .. id, 'st', 'owner', 'name', 'refs')
    local alive = f[1] == 'r' or (f[1] == 'd' and (f[4] ~= '0' or mode == 'h')) or (f[1] == 'p' and f[2] == client)
    if not alive or f[3] ~= name then return refuse('GONE', i, n[1] or '0', n[2] or '0') end
    pick = id
  elseif not n[1] or n[1] == '0' then
    return refuse('NOTFOUND', i)
  elseif mode == 's' then
    for _, id in ipairs(words(n[1] .. ' ' .. n[4])) do
      if not pick and tonumber(call('HGET', P .. 'v:' .. id, 's')) == arg then pick = id end
    end
    if not pick then return refuse(tonumber(n[2]) < arg and 'BEHIND' or 'GONE', i, n[1], n[2], n[3]) end
  else
    if (mode == 'm' and tonumber(n[2]) < arg) or (mode == 'w' and tonumber(n[1]) < arg) then
      return refuse('BEHIND', i, n[1], n[2], n[3])
    end
    pick = n[1]
  end
  found[#found + 1] = {name, pick, n[3] or '0', n[1] or '0'}
end
for i, row in ipairs(found) do
  lease(client, row[2], seq)
  rows[i] = row_of(row[1], row[2], row[3], row[4])
end
return rows
