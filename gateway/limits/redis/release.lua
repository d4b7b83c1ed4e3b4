-- Release slices that their worker has dropped: their requests have leases by now, or have ended. What is left of them counts as
-- used, their slots are free, and so is what is left of their money.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch, the scopes
-- ARGV  msgpack of {worker}
-- Returns how many there were

local leases_key, prefix = KEYS[1], KEYS[2]
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
local money = open_lease(leases_key, prefix, 'slice:' .. worker)
if money then
  close_lease(money, {})
  redis.call('ZREM', leases_key, 'slice:' .. worker)
  redis.call('DEL', prefix .. 'slice:' .. worker)
end
return found
