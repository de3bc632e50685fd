-- commit client version [claim]: make a pending version the current one of its name, or one part of a group step.
-- Returns {'ready', head, slot, first, kept ids, current, first own id} or {'part', received, slot, 0, '', current, 0}; a refusal aborts it.
-- With `claim` the client puts the name by itself from now on, if nothing else has to do with it: the last of the reply is
-- then the first of ids that are its own, else 0.
if stale() then return refuse('EPOCH') end
local client, v = ARGV[3], ARGV[4]
if call('EXISTS', P .. 'c:' .. client) == 0 then return refuse('UNJOINED') end
local f = call('HMGET', P .. 'v:' .. v, 'st', 'name', 'e', 's', 'label', 'part', 'world', 'retain', 'auto', 'orphan', 'evict', 'head', 'copy')
local st, name, e, s, world = f[1], f[2], tonumber(f[3]), tonumber(f[4]), tonumber(f[7])
if not st or st == 'd' then return refuse('ABORTED') end
local n = call('HMGET', P .. 'n:' .. name, 'v', 'e', 's', 'slot', 'hist', 'pe')
if st == 'r' then return {'ready', f[12] or v, n[4], '0', n[5], n[1], '0'} end

local function refused()
  local fence = f[13] == '1' and -1 or fence_of(f[5])
  if e < fence then return {'FENCED', fence} end
  if n[6] and e < tonumber(n[6]) then return {'FENCED', n[6]} end
  if n[1] == '0' then return nil end
  if e < tonumber(n[2]) then return {'FENCED', n[2]} end
  if e > tonumber(n[2]) then return nil end
  if s < tonumber(n[3]) then return {f[9] == '1' and 'LOST' or 'STALE', n[3]} end
  if s == tonumber(n[3]) and tonumber(v) < tonumber(n[1]) then return {'LOST', n[3]} end
end
local why = refused()
if why then
  abort(v)
  return refuse(unpack(why))
end

local parts = {}
if world > 1 then
  local key, step = P .. 'p:' .. name, f[3] .. ':' .. f[4] .. ':'
  local before = call('HGET', key, step .. f[6])
  if before and before ~= v then abort(before) end
  call('HSET', P .. 'v:' .. v, 'st', 'q')
  call('HSET', key, step .. f[6], v)
  call('HSET', P .. 'n:' .. name, 'pe', f[3])
  call('HDEL', P .. 'c:' .. client .. ':o', v)
  local received = 0
  for part = 0, world - 1 do
    local id = call('HGET', key, step .. part)
    if id then
      received = received + 1
      if id ~= v then parts[#parts + 1] = id end
    end
  end
  if received < world then return {'part', tostring(received), n[4], '0', '', n[1], '0'} end
  for part = 0, world - 1 do call('HDEL', key, step .. part) end
  for _, id in ipairs(parts) do call('HSET', P .. 'v:' .. id, 'st', 'r', 'head', v) end
  call('HSET', P .. 'v:' .. v, 'parts', table.concat(parts, ' '))
  call('HINCRBY', P .. 'n:' .. name, 'pend', -(world - 1))
  local waiting = call('HGETALL', key)   -- steps this one completes before, or supersedes
  for i = 1, #waiting, 2 do
    local we, ws = string.match(waiting[i], '(%d+):(-?%d+):')
    if tonumber(we) < e or tonumber(ws) <= s then abort(waiting[i + 1]) end
  end
end

-- An older version stays while it is among the newest `retain` and its step was not taken back by this publish.
local keep, old = {}, words(n[5])
if n[1] ~= '0' then table.insert(old, 1, n[1]) end
for _, id in ipairs(old) do
  local step = call('HGET', P .. 'v:' .. id, 's')
  if step and tonumber(step) < s and #keep < tonumber(f[8]) - 1 then keep[#keep + 1] = id else doom(id) end
end
local hist = table.concat(keep, ' ')
call('HSET', P .. 'v:' .. v, 'st', 'r')
call('HDEL', P .. 'c:' .. client .. ':o', v)
call('HSET', P .. 'n:' .. name, 'v', v, 'e', f[3], 's', f[4], 'hist', hist, 'label', f[5])
local pend = call('HINCRBY', P .. 'n:' .. name, 'pend', -1)
if f[10] == 'drop' then call('HSET', P .. 'c:' .. client .. ':d', v, name) end
if f[11] == '1' then call('ZADD', P .. 'evict', NOW, name) end
event('published', name, v, f[4])
local base = '0'
if ARGV[5] == '1' and pend == 0 and hist == '' and world == 1 and f[8] == '1' and f[10] == 'keep' and f[11] ~= '1'
    and call('HLEN', P .. 'c:' .. client .. ':n') < 256 then
  base = string.format('%d', call('INCRBY', P .. 'ver', 4096) - 4095)
  call('HSET', P .. 'n:' .. name, 'claim', base, 'by', client)
  call('HSET', P .. 'c:' .. client .. ':n', name, base)
  call('SADD', P .. 'claimants', client)
end
return {'ready', v, n[4], n[1] == '0' and '1' or '0', hist, v, base}
