-- Make counters of which nothing is known: what the books say was spent, and what open leases hold.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch, its lock for this, the set of its counters
-- ARGV  msgpack of {what the lock must hold, the books' watermark (Unix microseconds), list of {counter key, nano-USD, Unix
--       milliseconds until which it is kept (0: for ever)}, 1 to build anew those that there are}
-- Returns 1 done; 0 the lock is another's by now

local leases_key, prefix, lock_key, index_key = KEYS[1], KEYS[2], KEYS[4], KEYS[5]
local token, watermark, counters, anew = unpack(cmsgpack.unpack(ARGV[1]))
if redis.call('GET', lock_key) ~= token then
  return 0
end
assume_epoch(KEYS[3])
heal(leases_key, prefix)

local held = {}
for _, lease_id in ipairs(redis.call('ZRANGE', leases_key, 0, -1)) do
  local lease = record_of(prefix, lease_id)
  for _, post in ipairs(lease and lease.m or {}) do
    held[post[1]] = (held[post[1]] or 0) + post[2]
  end
end
for _, key in ipairs(redis.call('SMEMBERS', index_key)) do
  if redis.call('EXISTS', key) == 0 then
    redis.call('SREM', index_key, key)
  end
end
for _, counter in ipairs(counters) do
  local key, nano, until_ms = unpack(counter)
  if anew == 1 or redis.call('EXISTS', key) == 0 then
    redis.call('HSET', key, 'n', nano + (held[key] or 0), 'w', watermark, 'b', now, 'k', nano)
    if until_ms > 0 then
      redis.call('PEXPIREAT', key, until_ms)
    end
    redis.call('SADD', index_key, key)
  end
end
redis.call('DEL', lock_key)
return 1
