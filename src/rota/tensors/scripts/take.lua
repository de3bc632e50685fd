-- take client seq prefix n label epoch: lease the first n records of a channel (names with this prefix) that nobody
-- leases: a record is taken as long as it is leased. Asked again with the same seq it gives the same records.
-- Returns for each {name, how often it was taken, row_of...}.
if stale() then return refuse('EPOCH') end
local client, seq, n_max = ARGV[3], ARGV[4], tonumber(ARGV[6])
if call('EXISTS', P .. 'c:' .. client) == 0 then return refuse('UNJOINED') end
local fence, rows = fence_of(ARGV[7]), {}
if tonumber(ARGV[8]) < fence then return refuse('FENCED', fence) end
for _, name in ipairs(call('ZRANGEBYLEX', P .. 'names', '[' .. ARGV[5], '[' .. ARGV[5] .. '\255')) do
  if #rows == n_max then break end
  local n = call('HMGET', P .. 'n:' .. name, 'v', 'slot')
  if n[1] ~= '0' then
    local mine = call('HGET', P .. 'c:' .. client .. ':l', n[1]) == seq
    if mine or call('HGET', P .. 'v:' .. n[1], 'refs') == '0' then
      if not mine then
        lease(client, n[1], seq)
        call('HINCRBY', P .. 'n:' .. name, 'tries', 1)
      end
      local row = {name, call('HGET', P .. 'n:' .. name, 'tries')}
      for _, word in ipairs(row_of(name, n[1], n[2], n[1])) do row[#row + 1] = word end
      rows[#rows + 1] = row
    end
  end
end
return rows
