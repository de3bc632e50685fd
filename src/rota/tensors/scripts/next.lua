-- next: a number above all before it, in this namespace and across losses of the registry.
if stale() then return refuse('EPOCH') end
return call('INCR', P .. 'ver')
