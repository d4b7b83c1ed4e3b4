-- The books have these requests: see that each counter has each of them once, from the books or from its lease.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch
-- ARGV  msgpack of a list of {lease id, nano-USD, when the books had it, when it ended (both Unix microseconds), the counters}
-- Returns how many there were

local leases_key, prefix = KEYS[1], KEYS[2]

-- Nothing is known of its lease. If that was forgotten for its age alone, its settle counted it where there was a counter.
local function is_counted(key, ended)
  local built = tonumber(redis.call('HGET', key, 'b'))
  return now - ended > SETTLED_TTL_MS * 1000 and ended >= built
end

local booked = cmsgpack.unpack(ARGV[1])
for _, each in ipairs(booked) do
  local lease_id, nano, booked_at, ended, keys = unpack(each)
  local known = record_of(prefix, lease_id)
  local lease = known or {q = 1, m = {}}
  lease.g, lease.n = booked_at, nano
  for _, key in ipairs(keys) do
    if redis.call('EXISTS', key) == 1 and (known or not is_counted(key, ended)) then
      put(lease, post_of(lease, key), 0, nano)
    end
  end
  if lease.z then
    bury(prefix, lease_id, lease)
  elseif known and not lease.q then
    save_lease(prefix, lease_id, lease)
  elseif #lease.m > 0 then
    redis.call('SET', prefix .. lease_id, cmsgpack.pack(lease), 'PX', SETTLED_TTL_MS)
  end
end
return #booked
