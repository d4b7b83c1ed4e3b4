-- Take at once what was granted while Redis was away, once.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch, the scopes
-- ARGV  msgpack of {id of the debit, its TTL in milliseconds, for each scope a list of {kind, limit, burst, window, least,
--       most, most that the bucket may come to lack}}
-- Returns 1 taken; 0 it was taken before

local debit_id, ttl_ms, scopes = unpack(cmsgpack.unpack(ARGV[1]))
assume_epoch(KEYS[3])
heal(KEYS[1], KEYS[2])

if not redis.call('SET', KEYS[2] .. debit_id, 'settled', 'NX', 'PX', ttl_ms) then
  return 0
end
for i, charges in ipairs(scopes) do
  local scope = load_scope(KEYS[i + 3])
  begin_event(scope, charges)
  for _, charge in ipairs(charges) do
    local _, limit, _, window, least, most, lacking = unpack(charge)
    local bucket = bucket_of(scope, charge)
    local room = cost(lacking, limit, window) - deficit(bucket)
    take(bucket, math.max(cost(least, limit, window), math.min(cost(most, limit, window), room)))
  end
  save_scope(KEYS[i + 3], scope)
end
return 1
