-- Put off the expiry of leases, and note what each has used: an expiry keeps that. One that has expired though its request
-- runs on, or that Redis has forgotten, is opened again: it holds its slot, and what it uses from now on will be taken
-- when it is settled.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch
-- ARGV  msgpack of {lease TTL in microseconds, list of {lease id, units used so far by kind, its charges: list of {scope
--       key, list of {kind, limit, burst, window}}}}
-- Returns how many were open

local leases_key, prefix = KEYS[1], KEYS[2]
local lease_ttl, leases = unpack(cmsgpack.unpack(ARGV[1]))
assume_epoch(KEYS[3])
heal(leases_key, prefix)

local function reopened(packed, used, parts)
  local lease = packed and cmsgpack.unpack(packed) or {c = parts, m = {}, u = used}
  lease.x, lease.k = nil, lease.u
  lease.k.r = 1
  for _, held in ipairs(lease.m) do
    held[2] = 0
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
  local lease_id, used, parts = unpack(each)
  local packed = redis.call('GET', prefix .. lease_id)
  if packed ~= 'settled' then
    local lease
    if packed and redis.call('ZSCORE', leases_key, lease_id) then
      lease, open = cmsgpack.unpack(packed), open + 1
    else
      lease = reopened(packed, used, parts)
    end
    lease.u = used
    save_lease(prefix, lease_id, lease)
    redis.call('ZADD', leases_key, now + lease_ttl, lease_id)
  end
end
redis.call('PEXPIRE', leases_key, RECORD_TTL_MS)
return open
