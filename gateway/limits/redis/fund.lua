-- What a prepaid org may have spent in all, by its leases on what it has paid: told, or asked.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch, the counter
-- ARGV  msgpack of {version, nano-USD, microseconds for which that holds, nano-USD below which to top up, by model {what
--       comes to it, below which to top up}}; version 0: only asked. An older version changes nothing, so one that holds for 0 microseconds lets
--       go of all that was told before it, or is on its way.
-- Returns {nano-USD spent or held (-1: there is no counter), version that stands, microseconds for which it holds, nano-USD
--       that are left before it is to be topped up, what the books had when it was built}

local key = KEYS[4]
local version, nano, holds_us, refill, by_model = unpack(cmsgpack.unpack(ARGV[1]))
local n, f, e, v, r, k = unpack(redis.call('HMGET', key, 'n', 'f', 'e', 'v', 'r', 'k'))
if not n then
  return {-1, 0, 0, 0, 0}
end
f, e, v, r = tonumber(f) or 0, tonumber(e) or 0, tonumber(v) or 0, tonumber(r) or 0
if version > v then
  f, e, v, r = nano, now + holds_us, version, refill
  redis.call('HSET', key, 'f', f, 'e', e, 'v', v, 'r', r, 'p', cmsgpack.pack(by_model))
end
return {tonumber(n), v, math.max(0, e - now), f - n - r, tonumber(k) or 0}
