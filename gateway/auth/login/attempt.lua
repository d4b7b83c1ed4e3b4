-- One more attempt, or how long to wait. All counters or none are charged, before the secret is
-- looked at, so that a thousand attempts at once are a thousand.
--
-- KEYS: one hash per counter {n: attempts so far, until: ms}.
-- ARGV: for each counter: free attempts, first delay in ms, longest delay in ms, lifetime in ms.
-- Returns the longest wait in ms; 0: go on, and it is counted.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local wait = 0
for i, key in ipairs(KEYS) do
  local limit = tonumber(redis.call('HGET', key, 'until') or '0')
  if limit - now > wait then wait = limit - now end
end
if wait > 0 then return wait end
for i, key in ipairs(KEYS) do
  local at = (i - 1) * 4
  local free, first, longest = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local n = redis.call('HINCRBY', key, 'n', 1)
  if n >= free then
    local delay = math.min(longest, first * 2 ^ math.min(n - free, 30))
    redis.call('HSET', key, 'until', string.format('%d', now + delay))
  end
  redis.call('PEXPIRE', key, ARGV[at + 4])
end
return 0
