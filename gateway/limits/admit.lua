-- Admit over every scope, or over none. A refused request changes nothing (but expired leases are healed first).
--
-- KEYS  the org's open leases (sorted set: id -> expiry), prefix of lease keys, its epoch, the scopes, the counters
-- ARGV  msgpack of {lease id, lease TTL in microseconds, units by kind, scopes, caps}; of each scope {open leases it may
--       have (-1: any number), list of {kind, limit, burst, window}}; of each cap {nano-USD, nano-USD to hold, the
--       counter's TTL in milliseconds (-1: for ever)}
-- Returns {outcome, place, kind, wait, now, then per scope: open leases and each bucket's full moment}
--       outcome 0 refused: `place` is that of the scope or cap, `kind` that of the bucket ('s': open leases, 'm':
--       money), wait in microseconds, -1 for ever; 1 admitted; 2 this lease is open already and nothing was done;
--       3 this lease id was used up before; 4 the org has no epoch

local FOREVER = -1
local UNKNOWN = 1000000 -- until a stream ends, which nobody knows

local leases_key, prefix = KEYS[1], KEYS[2]
local lease_id, lease_ttl, units, asked, caps = unpack(cmsgpack.unpack(ARGV[1]))
if not read_epoch(KEYS[3]) then
  return {4, 0, '', 0, now}
end
heal(leases_key, prefix)

local scopes = {}
for i = 1, #asked do
  scopes[i] = load_scope(KEYS[i + 3])
end

-- What a bucket is, without making it one of the scope's.
local function bucket_for(scope, each)
  local kind, limit, burst, window = unpack(each)
  return scope.b[kind] or (limit > 0 and fresh(limit, burst, window)) or {f = 0}
end

-- Microseconds until `wanted` units fit; 0: now. More than the burst fits into a full bucket and leaves debt.
local function wait_for(bucket, wanted, limit, burst, window)
  if wanted == 0 then
    return 0
  elseif wanted > limit then
    return FOREVER
  elseif wanted > burst then
    return deficit(bucket)
  end
  return math.max(0, deficit(bucket) + cost(wanted, limit, window) - cost(burst, limit, window))
end

local function wait_for_lease(open, limit)
  if limit < 0 or open < limit then
    return 0
  end
  return limit == 0 and FOREVER or UNKNOWN
end

-- The longest wait is the one to name: before it is over, the request cannot pass.
local outcome, at, by_kind, longest = 1, 0, '', 0

local function consider(place, kind, wait)
  if longest ~= FOREVER and (wait == FOREVER or wait > longest) then
    outcome, at, by_kind, longest = 0, place, kind, wait
  end
end

for i, scope in ipairs(scopes) do
  local streams, buckets = unpack(asked[i])
  for _, each in ipairs(buckets) do
    local kind, limit, burst, window = unpack(each)
    consider(i, kind, wait_for(bucket_for(scope, each), units[kind], limit, burst, window))
  end
  consider(i, 's', wait_for_lease(scope.s, streams))
end
for j, cap in ipairs(caps) do
  local spent = tonumber(redis.call('GET', KEYS[3 + #asked + j]) or 0)
  consider(j, 'm', spent + cap[2] > cap[1] and FOREVER or 0)
end

if redis.call('EXISTS', prefix .. lease_id) == 1 then
  outcome = redis.call('ZSCORE', leases_key, lease_id) and 2 or 3
elseif outcome == 1 then
  local parts, held = {}, {}
  for i, scope in ipairs(scopes) do
    local charges = {}
    for _, each in ipairs(asked[i][2]) do
      local kind, limit, burst, window = unpack(each)
      if limit > 0 then
        table.insert(charges, {kind, limit, burst, window, {}})
      end
    end
    begin_event(scope, charges)
    for _, charge in ipairs(charges) do
      local amount = cost(units[charge[1]], charge[2], charge[4])
      take(bucket_of(scope, charge), amount)
      charge[5] = {{scope.n, amount}}
    end
    scope.s = scope.s + 1
    save_scope(KEYS[i + 3], scope)
    table.insert(parts, {KEYS[i + 3], charges})
  end
  for j, cap in ipairs(caps) do
    local key = KEYS[3 + #asked + j]
    redis.call('INCRBY', key, cap[2])
    if cap[3] > 0 then
      redis.call('PEXPIRE', key, cap[3])
    end
    table.insert(held, {key, cap[2]})
  end
  save_lease(prefix, lease_id, {c = parts, m = held, u = {}})
  redis.call('ZADD', leases_key, now + lease_ttl, lease_id)
  redis.call('PEXPIRE', leases_key, RECORD_TTL_MS)
end

local reply = {outcome, at, by_kind, longest, now}
for i, scope in ipairs(scopes) do
  table.insert(reply, scope.s)
  for _, each in ipairs(asked[i][2]) do
    table.insert(reply, bucket_for(scope, each).f)
  end
end
return reply
