-- What the limiter's scripts share: buckets, scopes and leases. Prepended to each of them (scripts.py).
--
-- Time is Redis', in microseconds; every amount below is an integer of microseconds of refill, so that nothing drifts.
-- All stay under 2^53 (see MAX_TOKENS and MAX_DEBT), where Lua's numbers are exact.
--
-- BUCKET {f, m}: `f` is the moment at which the bucket is full again. Its deficit is max(0, f - now); to take n units
-- of a limit per minute moves f forward by their cost, ceil(n * MINUTE / limit). An idle bucket needs no key at all.
--
-- A refund is not simply f minus the cost. While a lease was open the bucket refilled, and where it would have been
-- full without that lease, the refill would have run over and been lost. Giving that back would let a tenant save up
-- by holding reservations, and pass a minute's limit many times over. Exact is: no more than the lowest deficit the
-- bucket has had since the lease began. `m` holds those lows as {event, deficit} pairs, both ascending: the lowest
-- deficit at or after event e is that of the first pair at or after e. A refund lowers the pairs it spans by itself.
-- The result is the bucket that would stand if each lease had taken at the start what it used in the end.
--
-- SCOPE {s, n, t, r}: open leases, events so far, the buckets of tokens and of requests. One key per scope.
-- LEASE {x, c}: x = 1 once expired; c is a list of {scope key, event, tokens per minute, cost in tokens, requests per
-- minute, cost in requests}; a limit of 0 is none. A settled lease is the string "settled".

local MINUTE = 60000000
local DAY = 86400000000
local MAX_DEBT = DAY
local MAX_MARKS = 64
local HEAL_BATCH = 256
local SETTLED_TTL_MS = 900000
local RECORD_TTL_MS = DAY / 1000

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function cost(units, limit)
  return math.ceil(units * MINUTE / limit)
end

local function deficit(bucket)
  return math.max(0, bucket.f - now)
end

local function take(bucket, amount)
  bucket.f = math.min(math.max(bucket.f, now) + amount, now + MAX_DEBT)
end

-- Note the deficit as it is before this event. Beyond MAX_MARKS the two closest pairs become their lower one, which
-- can only make a refund smaller.
local function mark(bucket, event)
  local marks, low = bucket.m, deficit(bucket)
  while #marks > 0 and marks[#marks][2] >= low do
    table.remove(marks)
  end
  table.insert(marks, {event, low})
  if #marks > MAX_MARKS then
    local closest = 1
    for i = 2, #marks - 1 do
      if marks[i + 1][2] - marks[i][2] < marks[closest + 1][2] - marks[closest][2] then
        closest = i
      end
    end
    marks[closest][1] = marks[closest + 1][1]
    table.remove(marks, closest + 1)
  end
end

-- Give back up to `amount` of what was taken at `event`. Needs a mark of now.
local function refund(bucket, event, amount)
  local marks = bucket.m
  local first = #marks
  while first > 1 and marks[first - 1][1] > event do
    first = first - 1
  end
  amount = math.min(amount, marks[first][2])
  bucket.f = bucket.f - amount
  for i = first, #marks do
    marks[i][2] = marks[i][2] - amount
  end
  while first > 1 and marks[first - 1][2] >= marks[first][2] do
    table.remove(marks, first - 1)
    first = first - 1
  end
end

local function load_scope(key)
  local packed = redis.call('GET', key)
  if packed then
    return cmsgpack.unpack(packed)
  end
  return {s = 0, n = 0, t = {f = 0, m = {}}, r = {f = 0, m = {}}}
end

-- A scope without open leases is forgotten when its buckets are full.
local function save_scope(key, scope)
  local ttl_ms = RECORD_TTL_MS
  if scope.s == 0 then
    scope.n, scope.t.m, scope.r.m = 0, {}, {}
    ttl_ms = math.ceil(math.max(deficit(scope.t), deficit(scope.r)) / 1000)
  end
  if ttl_ms > 0 then
    redis.call('SET', key, cmsgpack.pack(scope), 'PX', ttl_ms)
  else
    redis.call('DEL', key)
  end
end

-- Begin an event of a scope: while leases are open, what they may get back is noted first.
local function begin_event(scope)
  scope.n = scope.n + 1
  if scope.s > 0 then
    mark(scope.t, scope.n)
    mark(scope.r, scope.n)
  end
end

-- Close an open lease: of what it took, `used` tokens stay taken; `keep_request`: its request too.
local function close_lease(lease, used, keep_request)
  for _, charge in ipairs(lease.c) do
    local key, event, tpm, tokens_cost, requests_cost = charge[1], charge[2], charge[3], charge[4], charge[6]
    local scope = load_scope(key)
    begin_event(scope)
    if scope.s > 0 then
      local left = tokens_cost - (tpm > 0 and cost(used, tpm) or 0)
      if left >= 0 then
        refund(scope.t, event, left)
      else
        take(scope.t, -left)
      end
      if not keep_request then
        refund(scope.r, event, requests_cost)
      end
      scope.s = scope.s - 1
    end
    save_scope(key, scope)
  end
end

-- Expired leases give back what they reserved; their records stay, so that a late settle can debit what was used.
local function heal(leases_key, prefix)
  local expired = redis.call('ZRANGEBYSCORE', leases_key, '-inf', now, 'LIMIT', 0, HEAL_BATCH)
  for _, lease_id in ipairs(expired) do
    redis.call('ZREM', leases_key, lease_id)
    local packed = redis.call('GET', prefix .. lease_id)
    if packed then
      local lease = cmsgpack.unpack(packed)
      close_lease(lease, 0, true)
      lease.x = 1
      redis.call('SET', prefix .. lease_id, cmsgpack.pack(lease), 'PX', RECORD_TTL_MS)
    end
  end
end
