-- Take more for open leases, whether or not it is there, and say for how long each must rest.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch
-- ARGV  msgpack of a list of {lease id, units to take by kind, units used so far by kind, 1 if it rests already}
-- Returns for each lease the microseconds until it may go on, 0: now, -1: it is not open. A lease rests once a bucket
--       of tokens is as deep in debt as it holds when full, and until that debt is paid.

local leases_key, prefix = KEYS[1], KEYS[2]
assume_epoch(KEYS[3])
heal(leases_key, prefix)

-- Two takes are enough for an exact refund: what is not used is of the newest. Older ones are added up as of the
-- oldest, which can only make a refund smaller.
local function remember(takes, event, amount)
  table.insert(takes, {event, amount})
  if #takes > MAX_TAKES then
    takes[1][2] = takes[1][2] + takes[2][2]
    table.remove(takes, 2)
  end
end

local function rest(scope, charge, bucket, resting)
  local full = cost(charge[3], charge[2], charge[4])
  local debt = deficit(bucket) + leased(scope, charge[1]) - full
  if ONE_REQUEST[charge[1]] or debt <= 0 then
    return 0
  end
  return (resting or debt >= full) and debt or 0
end

local function extend(lease_id, units, used, resting)
  local lease = open_lease(leases_key, prefix, lease_id)
  if not lease then
    return -1
  end
  local longest = 0
  for _, part in ipairs(lease.c) do
    local key, charges = part[1], part[2]
    local scope = load_scope(key)
    begin_event(scope, charges)
    for _, charge in ipairs(charges) do
      local bucket, wanted = bucket_of(scope, charge), units[charge[1]] or 0
      if wanted > 0 then
        local amount = cost(wanted, charge[2], charge[4])
        take(bucket, amount)
        remember(charge[5], scope.n, amount)
      end
      longest = math.max(longest, rest(scope, charge, bucket, resting))
    end
    save_scope(key, scope)
  end
  lease.u = used
  save_lease(prefix, lease_id, lease)
  return longest
end

local reply = {}
for _, each in ipairs(cmsgpack.unpack(ARGV[1])) do
  table.insert(reply, extend(each[1], each[2], each[3], each[4] == 1))
end
return reply
