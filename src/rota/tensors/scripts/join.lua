-- join client identity [version seq]...: register a client whose file is locked; its leases become exactly those given.
-- Returns the versions among them that are lost.
if stale() then return refuse('EPOCH') end
local client = ARGV[3]
call('SADD', P .. 'clients', client)
call('HSET', P .. 'c:' .. client, 'id', ARGV[4])
local given, lost = {}, {}
for i = 5, #ARGV, 2 do
  given[ARGV[i]] = true
  if call('EXISTS', P .. 'v:' .. ARGV[i]) == 1 then
    lease(client, ARGV[i], ARGV[i + 1])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
for _, v in ipairs(call('HKEYS', P .. 'c:' .. client .. ':l')) do
  if not given[v] then unlease(client, v) end
end
return lost
