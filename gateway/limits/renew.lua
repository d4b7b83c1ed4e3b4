-- Put off the expiry of open leases.
--
-- KEYS  the org's open leases, prefix of lease keys
-- ARGV  lease TTL in microseconds, lease ids
-- Returns how many were still open

local leases_key, prefix = KEYS[1], KEYS[2]
local expiry = now + tonumber(ARGV[1])
heal(leases_key, prefix)

local renewed = 0
for i = 2, #ARGV do
  if redis.call('ZSCORE', leases_key, ARGV[i]) then
    redis.call('ZADD', leases_key, expiry, ARGV[i])
    redis.call('PEXPIRE', prefix .. ARGV[i], RECORD_TTL_MS)
    renewed = renewed + 1
  end
end
redis.call('PEXPIRE', leases_key, RECORD_TTL_MS)
return renewed
