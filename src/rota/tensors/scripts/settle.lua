-- settle name first_id id version step length desc: end a claim, known by the first id that came with it. Its client has
-- published `version` in the block `id`; '' when it deleted the name, and 0 when it did nothing.
-- Returns 1, or 0 when the claim ended before.
if stale() then return refuse('EPOCH') end
local name, v = ARGV[3], ARGV[6]
local n = call('HMGET', P .. 'n:' .. name, 'claim', 'by', 'v', 's', 'label', 'e')
if n[1] ~= ARGV[4] then return 0 end
local by = n[2]
if v ~= '' and v ~= '0' and call('HEXISTS', P .. 'c:' .. by .. ':b', ARGV[5]) == 0 then return refuse('ABORTED') end
call('HDEL', P .. 'n:' .. name, 'claim', 'by')
call('HDEL', P .. 'c:' .. by .. ':n', name)
if call('EXISTS', P .. 'c:' .. by .. ':n') == 0 then call('SREM', P .. 'claimants', by) end
if v == '' then
  call('HSET', P .. 'n:' .. name, 'v', 0, 'e', 0, 's', 0)
  doom(n[3])
  event('deleted', name, n[3], n[4])
  forget_if_empty(name)
elseif v ~= '0' then
  adopt(by, ARGV[5], v, 'st', 'r', 'name', name, 'label', n[5], 'e', n[6], 's', ARGV[7], 'len', ARGV[8], 'desc', ARGV[9])
  call('HSET', P .. 'n:' .. name, 'v', v, 's', ARGV[7])
  doom(n[3])
  event('published', name, v, ARGV[7])
end
return 1
