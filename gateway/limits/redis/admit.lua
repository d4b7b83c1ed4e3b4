-- Admit over every scope, or over none. A refused request changes nothing (but expired leases are healed first).
--
-- KEYS  the org's open leases (sorted set: id -> expiry), prefix of lease keys, its epoch, the scopes, the counters
-- ARGV  msgpack of {lease id, lease TTL in microseconds, units by kind, scopes, caps, money}; of each scope {open leases it
--       may have (-1: any number), list of {kind, limit, burst, window}}; of each cap {nano-USD, 1 if no more than the counter
--       is funded with, either, share of this cell in millionths}; money {nano-USD to hold, of them for the input, pico-USD of a token of output, the fewest
--       tokens to write (0: as many as were asked for), the model, 1 if no more will be funded for it}
-- Returns {outcome, place, kind, wait, now, tokens, what is left under each cap, then per scope: open leases and each
--       bucket's full moment}
--       outcome 0 refused: `place` is that of the scope or cap, `kind` that of the bucket ('s': open leases, 'm':
--       money), wait in microseconds, -1 for ever; 1 admitted; 2 this lease is open already and nothing was done;
--       3 this lease id was used up before; 4 the org has no epoch; 5 there is no counter, at `place`;
--       6 what a day's bucket holds is not known; 7 the counter at `place` is not funded, or not far enough; 8 refused, and
--       it would pass but for what workers hold in slices, which they now give back. Where it was
--       admitted `place` is that of a counter that is to be topped up (0: none)
--       tokens: what money lets it write, -1: what was asked for; where money refused it, each cap in nano-USD, as far as it is funded

local FOREVER = -1
local UNKNOWN = 1000000 -- until a stream ends, which nobody knows

local leases_key, prefix = KEYS[1], KEYS[2]
local lease_id, lease_ttl, units, asked, caps, money = unpack(cmsgpack.unpack(ARGV[1]))
if not read_epoch(KEYS[3]) then
  return {4, 0, '', 0, now}
end
heal(leases_key, prefix)

local left, least, tightest, cap_of = {}, math.huge, 0, {}
local short, refill, refill_at = 0, 0, 0
for j, each in ipairs(caps) do
  local amount, funded, share = unpack(each)
  local n, f, e, r, by_model, booked = unpack(redis.call('HMGET', KEYS[3 + #asked + j], 'n', 'f', 'e', 'r', 'p', 'k'))
  local spent = tonumber(n)
  if not spent then
    return {5, j, '', 0, now}
  end
  if funded == 1 then
    if not by_model or tonumber(e) <= now then
      return {7, j, '', 0, now}
    end
    local of_model, refill_of_model = unpack(cmsgpack.unpack(by_model)[money[5]] or {0, 0})
    local most = tonumber(f) + of_model
    refill, refill_at = j, math.max(tonumber(r), refill_of_model)
    if of_cell(most, booked, share) - spent < money[1] and most < amount and money[6] == 0 then
      short = j
    end
    amount = math.min(amount, most)
  end
  amount = of_cell(amount, booked, share)
  cap_of[j] = amount
  left[j] = amount - spent
  if left[j] < least then
    least, tightest = left[j], j
  end
end

local scopes = {}
for i = 1, #asked do
  scopes[i] = load_scope(KEYS[i + 3])
end

-- What a bucket is, without making it one of the scope's.
local function bucket_for(scope, each)
  local kind, limit, burst, window = unpack(each)
  return scope.b[kind] or (limit > 0 and fresh(scope, kind, limit, burst, window)) or {f = 0}
end

for i, scope in ipairs(scopes) do
  for _, each in ipairs(asked[i][2]) do
    local kind, limit, burst, window = unpack(each)
    if window == DAY and limit > 0 and not scope.b[kind] and not fresh(scope, kind, limit, burst, window) then
      return {6, i, kind, 0, now}
    end
  end
end

-- Microseconds until `wanted` units fit beside what is `held` by others; 0: now. More than the burst fits into a full bucket
-- and leaves debt.
local function wait_for(bucket, held, wanted, limit, burst, window)
  local missing = deficit(bucket) + held
  if wanted == 0 then
    return 0
  elseif wanted > limit then
    return FOREVER
  elseif wanted > burst then
    return missing
  end
  return math.max(0, missing + cost(wanted, limit, window) - cost(burst, limit, window))
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

local function consider_scopes(with_slices)
  for i, scope in ipairs(scopes) do
    local streams, buckets = unpack(asked[i])
    for _, each in ipairs(buckets) do
      local kind, limit, burst, window = unpack(each)
      local held = with_slices and leased(scope, kind) or 0
      consider(i, kind, wait_for(bucket_for(scope, each), held, units[kind], limit, burst, window))
    end
    consider(i, 's', wait_for_lease(scope.s + (with_slices and leased_slots(scope) or 0), streams))
  end
end

-- Whether there are slices of any scope: if so, of all that have any nobody gets another for a while.
local function call_slices_back()
  local are_any = false
  for i, scope in ipairs(scopes) do
    if has_live_slices(scope) then
      are_any = true
      scope.z = now + SCARCE
      save_scope(KEYS[i + 3], scope)
    end
  end
  return are_any
end

-- The same for caps that have not left `wanted`: what workers hold of them for no request yet comes back, and with it what they
-- have yet to settle.
local function call_money_back(wanted)
  local are_any = false
  for j in ipairs(caps) do
    local key = KEYS[3 + #asked + j]
    if left[j] < wanted and next(money_slices(key)) then
      are_any = true
      redis.call('HSET', key, 'z', now + SCARCE)
    end
  end
  return are_any
end

consider_scopes(false)

local known = record_of(prefix, lease_id)
local fits = #caps == 0 or money[1] <= least
local awaits_money = not fits and outcome == 1 and not known and short == 0 and call_money_back(money[1])

-- Where nobody said how much may be written, it is what is left.
local hold, tokens = money[1], -1
if #caps > 0 and hold > least then
  local _, input, price, step = unpack(money)
  if step > 0 and price > 0 then
    tokens = math.floor((least - input) * 1000 / price / step) * step
    hold = input + math.ceil(tokens * price / 1000)
    while tokens > 0 and hold > least do
      tokens = tokens - step
      hold = input + math.ceil(tokens * price / 1000)
    end
  end
  if tokens < 1 then
    consider(tightest, 'm', FOREVER)
  end
end

if awaits_money then
  outcome, at, by_kind, longest, tokens = 8, tightest, 'm', FOREVER, cap_of
end
if outcome == 0 and by_kind ~= 'm' and not known then
  call_slices_back()
elseif outcome == 1 and not known then
  consider_scopes(true)
  if outcome == 0 and call_slices_back() then
    outcome = 8
  end
end
if short > 0 and not known and (outcome == 1 or by_kind == 'm') then
  return {7, short, 'm', 0, now}
end
if outcome == 0 and by_kind == 'm' then
  tokens = cap_of
elseif outcome == 1 and refill > 0 and left[refill] - hold < refill_at then
  at = refill
end
if known then
  outcome = redis.call('ZSCORE', leases_key, lease_id) and 2 or 3
  tokens = known.t or -1
elseif outcome == 1 then
  local parts, posts = {}, {}
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
  local lease = {c = parts, m = posts, u = {}, t = tokens}
  for j = 1, #caps do
    posts[j] = {KEYS[3 + #asked + j], 0, 0, 0, hold}
    put(lease, posts[j], hold, 0)
    left[j] = left[j] - hold
  end
  save_lease(prefix, lease_id, lease)
  redis.call('ZADD', leases_key, now + lease_ttl, lease_id)
  redis.call('PEXPIRE', leases_key, RECORD_TTL_MS)
end

local reply = {outcome, at, by_kind, longest, now, tokens, left}
for i, scope in ipairs(scopes) do
  table.insert(reply, scope.s)
  for _, each in ipairs(asked[i][2]) do
    table.insert(reply, full_at(scope, each[1], bucket_for(scope, each)))
  end
end
return reply
