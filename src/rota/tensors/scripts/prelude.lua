-- Shared by all scripts. KEYS[1] is "{namespace}:", ARGV[1] the registry epoch the caller joined, ARGV[2] its wall
-- clock in milliseconds. A script first decides whether to refuse, then changes; nothing is changed before a refusal
-- but the abort of the caller's own pending version.
local P, EPOCH, NOW = KEYS[1], ARGV[1], ARGV[2]
local call = redis.call

-- The dot: an error of one word would get the server's own code in front of it.
local function refuse(...) return redis.error_reply(table.concat({...}, ' ') .. ' .') end

local function stale() return call('HGET', P .. 'cfg', 'epoch') ~= EPOCH end

local function event(kind, name, v, step)
  call('XADD', P .. 'ev', 'MAXLEN', '~', 10000, '*', 'kind', kind, 'name', name, 'version', v, 'step', step, 'at', NOW)
end

local function words(text)
  local out = {}
  for word in string.gmatch(text or '', '%S+') do out[#out + 1] = word end
  return out
end

-- A block goes back to the free list of its size, the newest freed is used first: its pages are still in memory.
local function give_back(seg, off, blk)
  call('RPUSH', P .. 'free:' .. blk, seg .. ' ' .. off)
  call('HINCRBY', P .. 'bytes', 'used', -tonumber(blk))
  if call('HINCRBY', P .. 's:' .. seg, 'used', -1) == 0 then call('ZADD', P .. 'idle', NOW, seg) end
end

-- Forget a version whose last lease ended; the parts of a group step go with their head.
local function free(v)
  local f = call('HMGET', P .. 'v:' .. v, 'seg', 'off', 'blk', 'name', 's', 'parts', 'owner', 'orphan')
  if not f[1] then return end
  call('DEL', P .. 'v:' .. v)
  if f[8] == 'drop' then call('HDEL', P .. 'c:' .. f[7] .. ':d', v) end
  give_back(f[1], f[2], f[3])
  for _, part in ipairs(words(f[6])) do free(part) end
  if f[4] ~= '' then event('reclaimed', f[4], v, f[5]) end
end

-- A block of a size: its segment and offset; or nil, the bytes of all files, and the quota that they would exceed.
local function take_block(blk, count, file)
  local free, seg, off = call('RPOP', P .. 'free:' .. blk), nil, nil
  if free then
    seg, off = string.match(free, '(%S+) (%S+)')
  else
    seg = call('GET', P .. 'cur:' .. blk)
    local at = seg and tonumber(call('HGET', P .. 's:' .. seg, 'next') or count) or count
    if at >= count then
      local quota = call('HGET', P .. 'cfg', 'quota')
      local files = tonumber(call('HGET', P .. 'bytes', 'files') or '0')
      if quota and files + file > tonumber(quota) then return nil, nil, files, quota end
      seg, at = 'seg-' .. blk .. '-' .. call('INCR', P .. 'ver'), 0
      call('HSET', P .. 's:' .. seg, 'blk', blk, 'count', count, 'file', file, 'next', 0, 'used', 0)
      call('SADD', P .. 'segs', seg)
      call('HINCRBY', P .. 'bytes', 'files', file)
      call('SET', P .. 'cur:' .. blk, seg)
    end
    call('HINCRBY', P .. 's:' .. seg, 'next', 1)
    off = string.format('%d', at * tonumber(blk))
  end
  call('HINCRBY', P .. 's:' .. seg, 'used', 1)
  call('ZREM', P .. 'idle', seg)
  call('HINCRBY', P .. 'bytes', 'used', blk)
  return seg, off
end

-- A spare block of a client (see stock.lua) becomes that of a version; false when it is not the client's any more.
local function adopt(client, spare, v, ...)
  if call('HDEL', P .. 'c:' .. client .. ':b', spare) == 0 then return false end
  if spare ~= v then call('RENAME', P .. 'v:' .. spare, P .. 'v:' .. v) end
  call('HSET', P .. 'v:' .. v, 'at', NOW, ...)
  return true
end

-- The last lease that is known here ended. A version that readers may lease by a note in their file alone ("dir") waits
-- in limbo until a process has looked at these files: see reap.lua.
local function reclaim(v)
  if call('HGET', P .. 'v:' .. v, 'dir') == '1' then call('SADD', P .. 'limbo', v) else free(v) end
end

-- No new reader gets this version any more; its bytes stay until the last lease ends.
local function doom(v)
  if call('EXISTS', P .. 'v:' .. v) == 0 then return end
  call('HSET', P .. 'v:' .. v, 'st', 'd')
  if tonumber(call('HGET', P .. 'v:' .. v, 'refs')) == 0 then reclaim(v) end
end

local function unlease(client, v)
  call('HDEL', P .. 'c:' .. client .. ':l', v)
  if call('HINCRBY', P .. 'v:' .. v, 'refs', -1) == 0 and call('HGET', P .. 'v:' .. v, 'st') == 'd' then reclaim(v) end
end

local function lease(client, v, seq)
  local key = P .. 'c:' .. client .. ':l'
  local old = call('HGET', key, v)
  if not old then call('HINCRBY', P .. 'v:' .. v, 'refs', 1) end
  if not old or tonumber(old) < tonumber(seq) then call('HSET', key, v, seq) end
end

-- What a reader needs of a leased version: {version, slot, epoch, step, current, [part version, segment, offset,
-- block]...}.
local function row_of(name, v, slot, current)
  local f = call('HMGET', P .. 'v:' .. v, 'e', 's', 'seg', 'off', 'blk', 'parts', 'evict')
  local out = {v, slot, f[1], f[2], current, v, f[3], f[4], f[5]}
  for _, part in ipairs(words(f[6])) do
    local b = call('HMGET', P .. 'v:' .. part, 'seg', 'off', 'blk')
    out[#out + 1] = part
    for k = 1, 3 do out[#out + 1] = b[k] end
  end
  if f[7] == '1' then call('ZADD', P .. 'evict', 'XX', NOW, name) end
  return out
end

-- A name without a version and without anything on the way gives its slot back.
local function forget_if_empty(name)
  local n = call('HMGET', P .. 'n:' .. name, 'v', 'pend', 'slot')
  if n[1] == '0' and n[2] == '0' then
    call('DEL', P .. 'n:' .. name)
    call('ZREM', P .. 'names', name)
    call('ZREM', P .. 'evict', name)
    call('RPUSH', P .. 'slotfree', n[3])
  end
end

-- Undo a pending or prepared version.
local function abort(v)
  local f = call('HMGET', P .. 'v:' .. v, 'name', 'owner', 'part', 'e', 's', 'st')
  if not f[1] then return end
  call('HDEL', P .. 'c:' .. f[2] .. ':o', v)
  if f[6] == 'q' then
    local field = f[4] .. ':' .. f[5] .. ':' .. f[3]
    if call('HGET', P .. 'p:' .. f[1], field) == v then call('HDEL', P .. 'p:' .. f[1], field) end
  end
  call('HINCRBY', P .. 'n:' .. f[1], 'pend', -1)
  doom(v)  -- not freed: its writer may still have the view that it wrote through, which its file notes
  forget_if_empty(f[1])
end

-- The highest fence on a label or on one of its ancestors ("job" fences "job/actor/0"), or -1.
local function fence_of(label)
  local top, upto = -1, string.len(label)
  while upto > 0 do
    local fence = call('HGET', P .. 'fence', string.sub(label, 1, upto))
    if fence and tonumber(fence) > top then top = tonumber(fence) end
    upto = upto - 1
    while upto > 0 and string.sub(label, upto + 1, upto + 1) ~= '/' do upto = upto - 1 end
  end
  return top
end
