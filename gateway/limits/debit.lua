-- Take at once what was granted while Redis was away, once.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch, the scopes
-- ARGV  msgpack of {id of the debit, its TTL in milliseconds, for each scope a list of {kind, limit, burst, window, units}}
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
    take(bucket_of(scope, charge), cost(charge[5], charge[2], charge[4]))
  end
  save_scope(KEYS[i + 3], scope)
end
return 1
