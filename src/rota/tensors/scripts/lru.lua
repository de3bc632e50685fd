-- lru: evictable names, the least recently used first.
if stale() then return refuse('EPOCH') end
return call('ZRANGE', P .. 'evict', 0, -1)
