-- Admit over every scope, or over none. A refused request changes nothing (but expired leases are healed first).
--
-- KEYS  the org's open leases (sorted set: id -> expiry), prefix of lease keys, the scopes
-- ARGV  lease id, lease TTL in microseconds, tokens, then per scope: tokens per minute, its burst, requests per
--       minute, its burst, open leases; -1 is no limit
-- Returns {outcome, scope, kind, wait, now, then per scope: full moments of tokens and of requests, open leases}
--       outcome 0 refused (scope and kind 1..3 say by which, wait in microseconds, -1 for ever), 1 admitted,
--       2 this lease is open already and nothing was done, 3 this lease id was used up before

local FOREVER = -1
local UNKNOWN = 1000000 -- until a stream ends, which nobody knows

local leases_key, prefix = KEYS[1], KEYS[2]
local lease_id, lease_ttl, tokens = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
heal(leases_key, prefix)

local scopes, limits = {}, {}
for i = 3, #KEYS do
  local at = 4 + (i - 3) * 5
  table.insert(scopes, load_scope(KEYS[i]))
  table.insert(limits, {
    tpm = tonumber(ARGV[at]), tokens_burst = tonumber(ARGV[at + 1]),
    rpm = tonumber(ARGV[at + 2]), requests_burst = tonumber(ARGV[at + 3]),
    leases = tonumber(ARGV[at + 4]),
  })
end

-- Microseconds until `units` fit; 0: now. More than the burst fits into a full bucket and leaves debt.
local function wait_for(bucket, units, limit, burst)
  if limit < 0 or units == 0 then
    return 0
  elseif units > limit then
    return FOREVER
  elseif units > burst then
    return deficit(bucket)
  end
  return math.max(0, deficit(bucket) + cost(units, limit) - cost(burst, limit))
end

local function wait_for_lease(open, limit)
  if limit < 0 or open < limit then
    return 0
  end
  return limit == 0 and FOREVER or UNKNOWN
end

-- The longest wait is the one to name: before it is over, the request cannot pass.
local outcome, by_scope, by_kind, longest = 1, 0, 0, 0
for i, scope in ipairs(scopes) do
  local limit = limits[i]
  local waits = {
    wait_for(scope.t, tokens, limit.tpm, limit.tokens_burst),
    wait_for(scope.r, 1, limit.rpm, limit.requests_burst),
    wait_for_lease(scope.s, limit.leases),
  }
  for kind, wait in ipairs(waits) do
    if longest ~= FOREVER and (wait == FOREVER or wait > longest) then
      outcome, by_scope, by_kind, longest = 0, i, kind, wait
    end
  end
end

if redis.call('EXISTS', prefix .. lease_id) == 1 then
  outcome = redis.call('ZSCORE', leases_key, lease_id) and 2 or 3
elseif outcome == 1 then
  local charges = {}
  for i, scope in ipairs(scopes) do
    local tpm, rpm = math.max(0, limits[i].tpm), math.max(0, limits[i].rpm)
    local tokens_cost = tpm > 0 and cost(tokens, tpm) or 0
    local requests_cost = rpm > 0 and cost(1, rpm) or 0
    begin_event(scope)
    if tpm > 0 then
      take(scope.t, tokens_cost)
    end
    if rpm > 0 then
      take(scope.r, requests_cost)
    end
    scope.s = scope.s + 1
    save_scope(KEYS[i + 2], scope)
    table.insert(charges, {KEYS[i + 2], scope.n, tpm, tokens_cost, rpm, requests_cost})
  end
  redis.call('SET', prefix .. lease_id, cmsgpack.pack({c = charges}), 'PX', RECORD_TTL_MS)
  redis.call('ZADD', leases_key, now + lease_ttl, lease_id)
  redis.call('PEXPIRE', leases_key, RECORD_TTL_MS)
end

local reply = {outcome, by_scope, by_kind, longest, now}
for _, scope in ipairs(scopes) do
  table.insert(reply, scope.t.f)
  table.insert(reply, scope.r.f)
  table.insert(reply, scope.s)
end
return reply
