-- Settle a lease with what was used, once.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch, then the scopes and the counters to debit if the lease has left no
--       record
-- ARGV  msgpack of {lease id, units used by kind (of requests 0 for one that never ran), the scopes' lists of {kind,
--       limit, burst, window}, and, where a slice had paid for it, which counts as used, units by kind}
-- Returns 0 settled before, nothing was done; 1 settled; 2 it had expired, or was forgotten, and was debited; 3 nothing
--       is known of it

local leases_key, prefix = KEYS[1], KEYS[2]
local lease_id, used, scopes, paid = unpack(cmsgpack.unpack(ARGV[1]))
assume_epoch(KEYS[3])
heal(leases_key, prefix)

-- A lease with this request's scopes and counters, that has taken nothing.
local function forgotten()
  local parts, posts = {}, {}
  for i, buckets in ipairs(scopes) do
    table.insert(parts, {KEYS[i + 3], buckets})
  end
  for i = 4 + #scopes, #KEYS do
    table.insert(posts, {KEYS[i], 0, 0, 0, 0})
  end
  return {c = parts, m = posts}
end

local outcome
local lease = record_of(prefix, lease_id)
if lease and lease.z then
  return 0
elseif not lease or lease.q then
  local booked = lease
  lease = forgotten()
  if booked then
    lease.m, lease.g = booked.m, booked.g
  end
  debit(lease, used, paid or {})
  outcome = #KEYS > 3 and 2 or 3
elseif lease.x then
  outcome = 2
  debit(lease, used, lease.u)
else
  outcome = 1
  close_lease(lease, used)
  redis.call('ZREM', leases_key, lease_id)
end
bury(prefix, lease_id, lease)
return outcome
