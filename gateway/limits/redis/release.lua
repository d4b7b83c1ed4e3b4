-- Release slices that their worker has dropped: their requests have leases by now, or have ended. What is left of them counts as
-- used, and their slots are free.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch, the scopes
-- ARGV  msgpack of {worker}
-- Returns how many there were

local worker = unpack(cmsgpack.unpack(ARGV[1]))
local found = 0
for i = 4, #KEYS do
  local scope = load_scope(KEYS[i])
  if scope.h and scope.h[worker] then
    expire_slice(scope, worker, now)
    scope.h[worker] = nil
    save_scope(KEYS[i], scope)
    found = found + 1
  end
end
return found
