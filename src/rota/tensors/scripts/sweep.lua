-- sweep client n_max: undo what a dead client (or a closing one, a pin, a fork hold) still has, a slice at a time.
-- Returns {left, leases ended, publishes aborted, [version name]... to delete because their owner is gone}.
if stale() then return refuse('EPOCH') end
local client, n_max = ARGV[3], tonumber(ARGV[4])
local base, ended, aborted, out = P .. 'c:' .. client, 0, 0, {}
local left = call('HLEN', base .. ':b') + call('HLEN', base .. ':n')
for _, v in ipairs(call('HKEYS', base .. ':l')) do
  if ended < n_max then
    unlease(client, v)
    ended = ended + 1
  else
    left = left + 1
  end
end
for _, v in ipairs(call('HKEYS', base .. ':o')) do
  if aborted < n_max then
    abort(v)
    aborted = aborted + 1
  else
    left = left + 1
  end
end
local drops = call('HGETALL', base .. ':d')
for i = 1, #drops, 2 do
  if call('HGET', P .. 'n:' .. drops[i + 1], 'v') == drops[i] then
    if #out < 2 * n_max then  -- what a reply holds is limited
      out[#out + 1] = drops[i]
      out[#out + 1] = drops[i + 1]
    end
    left = left + 1
  else
    call('HDEL', base .. ':d', drops[i])
  end
end
if left == 0 then
  call('DEL', base, base .. ':l', base .. ':o', base .. ':d')
  call('SREM', P .. 'clients', client)
  event('left', client, 0, 0)
end
return {left, ended, aborted, unpack(out)}
