-- Put off the expiry of leases, and note what each has used: an expiry keeps that. One that has expired though its request
-- runs on, or that Redis has forgotten, is opened again: it holds its slot, and what it uses from now on will be taken
-- when it is settled.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch
-- ARGV  msgpack of {lease TTL in microseconds, list of {lease id, units used so far by kind, its charges: list of {scope
--       key, list of {kind, limit, burst, window}}, what it holds: list of {counter key, nano-USD}}}
-- Returns how many were open

local leases_key, prefix = KEYS[1], KEYS[2]
local lease_ttl, leases = unpack(cmsgpack.unpack(ARGV[1]))
assume_epoch(KEYS[3])
heal(leases_key, prefix)

local function reopened(lease, used, parts, holds)
  if not lease or lease.q then
    lease = {c = parts, m = {}, u = {}}
    for kind, units in pairs(used) do
      lease.u[kind] = kind ~= 'm' and units or nil
    end
    for i, hold in ipairs(holds) do
      lease.m[i] = {hold[1], 0, 0, 0, hold[2]}
    end
  end
  lease.x, lease.k = nil, lease.u
  count_request(lease.k)
  for _, post in ipairs(lease.m) do
    local spent = lease.u.m or 0
    put(lease, post, math.max(0, post[5] - spent), spent)
  end
  for _, part in ipairs(lease.c) do
    for _, charge in ipairs(part[2]) do
      charge[5] = {}
    end
    local scope = load_scope(part[1])
    scope.s = scope.s + 1
    save_scope(part[1], scope)
  end
  return lease
end

local open = 0
for _, each in ipairs(leases) do
  local lease_id, used, parts, holds = unpack(each)
  local lease = record_of(prefix, lease_id)
  if not lease or not lease.z then
    if lease and redis.call('ZSCORE', leases_key, lease_id) then
      open = open + 1
    else
      lease = reopened(lease, used, parts, holds)
    end
    lease.u = used
    save_lease(prefix, lease_id, lease)
    redis.call('ZADD', leases_key, now + lease_ttl, lease_id)
  end
end
redis.call('PEXPIRE', leases_key, RECORD_TTL_MS)
return open
