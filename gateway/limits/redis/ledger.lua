-- What the limiter's scripts share: buckets, scopes, leases and counters. Prepended to each of them (scripts.py).
--
-- Time is Redis', in microseconds; every amount below is an integer of microseconds of refill, so that nothing drifts.
-- All stay under 2^53 (see MAX_TOKENS and MAX_DEBT), where Lua's numbers are exact; so do counters, in nano-USD.
--
-- BUCKET {f, m}: `f` is the moment at which the bucket is full again. Its deficit is max(0, f - now); to take n units
-- of a limit per window moves f forward by their cost, ceil(n * window / limit). An idle bucket needs no key at all.
--
-- A refund is not simply f minus the cost. While a lease was open the bucket refilled, and where it would have been
-- full without that lease, the refill would have run over and been lost. Giving that back would let a tenant save up
-- by holding reservations, and pass a minute's limit many times over. Exact is: no more than the lowest deficit the
-- bucket has had since the units were taken. `m` holds those lows as {event, deficit} pairs, both ascending: the lowest
-- deficit at or after event e is that of the first pair at or after e. A refund lowers the pairs it spans by itself.
-- The result is the bucket that would stand if each lease had only ever taken what it used in the end.
--
-- SCOPE {s, n, b, h, z}: open leases, events so far, buckets by kind: the letter of the limit
-- (`gateway.principal.PlanLimit`). One key per scope. A bucket that is full and unmarked is left out. h: by worker its
-- SLICE, where there is any; z: until when the scope is scarce, so that nobody gets one.
-- SLICE {x, l, y, s, u}: what a worker may use without asking (`limits/slices/README.md`): until x, where it counts as used;
-- y: requests that run on it and have no lease; s: the slots it holds until l, theirs included; u: by kind what it holds. It is
-- not in a bucket's deficit until it is used, and not there for anybody else.
-- COUNTER, a hash {n, w, b, k, h, z}: n nano-USD that are spent or held; w its watermark: what stood in the books of Postgres before
-- that moment of theirs is in it from the beginning; b when it was built, by Redis' clock, and k what the books had then. Of an org that has spent nothing
-- there is one all the same: where there is none, nobody knows. h: by worker {x, f}: until when it may use the f nano-USD that
-- it holds for no request yet; z: until when nobody gets any.
-- What a worker holds of counters is a lease, `slice:` and its name: so it expires, and is in a counter that is built, as any.
-- LEASE {x, u, k, c, m, g, t}: x = 1 once expired; u: units used by kind, as far as its gateway has said; k: those of them
-- that were settled before, where it was opened again; c: list of {scope key, list of CHARGE}; m: list of POST; g, n: when the
-- books had it, and what it cost by them; t: tokens it may write, where money says so. A settled lease is the string "settled", or with any POST
-- {z = 1, m, g}; one of which only the books told is {q = 1, m, g}.
-- One that an exchange has opened is {r, e, a, ...} for c: r names a TEMPLATE, list of {scope key, list of {kind, limit, burst,
-- window}}, which such leases share; e: its event in each of those scopes; a: the units it took by kind.
-- POST {counter key, nano-USD held, nano-USD spent, watermark of the counter that has them spent, nano-USD to hold}: an open
-- lease's are in its counter, or will be when that is built.
-- CHARGE {kind, limit, burst, window, takes}, takes: list of {event, cost}, ascending.

local DAY = 86400000000
local MAX_DEBT = 2 * DAY
local MAX_MARKS = 64
local MAX_TAKES = 2
local HEAL_BATCH = 256
local SETTLED_TTL_MS = 900000
local RECORD_TTL_MS = MAX_DEBT / 1000
local SCARCE = 1000000

local ceil = math.ceil
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function cost(units, limit, window)
  return ceil(units * window / limit)
end

-- How much of a cap is for this cell: what the books had when its counter was built, and of the rest a share in millionths.
local function of_cell(amount, booked, share)
  booked = tonumber(booked) or 0
  if not share or share >= 1000000 or amount <= booked then
    return amount
  end
  return booked + math.floor((amount - booked) / 1000000 * share)
end

local function deficit(bucket)
  return math.max(0, bucket.f - now)
end

local function take(bucket, amount)
  bucket.f = math.min(math.max(bucket.f, now) + amount, now + MAX_DEBT)
end

-- Note the deficit as it is before this event. Beyond MAX_MARKS the two closest pairs become their lower one, which
-- can only make a refund smaller, by their distance: about deficit / MAX_MARKS.
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

-- As `refund` of each amount by its event, the oldest first, in one walk along the marks.
local function refund_all(bucket, by_event)
  local marks, events, back = bucket.m, {}, 0
  for event in pairs(by_event) do
    table.insert(events, event)
  end
  table.sort(events)
  local next_one = 1
  for i, pair in ipairs(marks) do
    local low = pair[2] - back
    while next_one <= #events and (i == #marks or events[next_one] < pair[1]) do
      local amount = math.min(by_event[events[next_one]], low)
      low, back, next_one = low - amount, back + amount, next_one + 1
    end
    pair[2] = low
  end
  bucket.f = bucket.f - back
  local kept, lowest = {}, math.huge
  for i = #marks, 1, -1 do
    if marks[i][2] < lowest then
      lowest = marks[i][2]
      table.insert(kept, marks[i])
    end
  end
  bucket.m = {}
  for i = #kept, 1, -1 do
    table.insert(bucket.m, kept[i])
  end
end

local loaded, key_of = {}, {} -- scopes by key, and the other way round

local function expire_slice(scope, worker, at)
  local slice = scope.h[worker]
  for kind, amount in pairs(slice.u) do
    local bucket = scope.b[kind] or {f = 0, m = {}}
    scope.b[kind] = bucket
    bucket.f = math.min(math.max(bucket.f, at) + amount, now + MAX_DEBT)
  end
  slice.u = {}
end

-- A slice that its worker has neither renewed nor given back has been used, as far as anybody knows. Its streams may run on, so
-- they have their slots for as long as a lease of theirs would.
local function expire_slices(scope)
  for worker, slice in pairs(scope.h or {}) do
    if slice.x <= now then
      expire_slice(scope, worker, slice.x)
      if slice.s == 0 or (slice.l or 0) <= now then
        scope.h[worker] = nil
      end
    end
  end
end

-- Whether a worker may give something back of it.
local function has_live_slices(scope)
  for _, slice in pairs(scope.h or {}) do
    if slice.x > now then
      return true
    end
  end
  return false
end

local function load_scope(key)
  local scope = loaded[key]
  if not scope then
    local packed = redis.call('GET', key)
    scope = packed and cmsgpack.unpack(packed) or {s = 0, n = 0, b = {}}
    loaded[key], key_of[scope] = scope, key
    expire_slices(scope)
  end
  return scope
end

-- What workers hold of a bucket, in microseconds of refill.
local function leased(scope, kind)
  local amount = 0
  for _, slice in pairs(scope.h or {}) do
    amount = amount + (slice.u[kind] or 0)
  end
  return amount
end

local function leased_slots(scope)
  local slots = 0
  for _, slice in pairs(scope.h or {}) do
    slots = slots + slice.s
  end
  return slots
end

-- The moment at which a bucket is full again, if all that is leased of it is used.
local function full_at(scope, kind, bucket)
  local amount = leased(scope, kind)
  return amount > 0 and math.max(bucket.f, now) + amount or bucket.f
end

-- Where nothing is known of a bucket it is full, or as full as it can be since the epoch: the moment at which Redis was
-- empty and somebody may have used something before.
local epoch = 0

-- A day's bucket is as full as the books say, which somebody has noted beside its scope; nil: nobody has, yet.
local function fresh(scope, kind, limit, burst, window)
  if window == DAY and epoch > 0 and now < epoch + DAY then
    local noted = tonumber(redis.call('GET', key_of[scope] .. ':day:' .. kind))
    return noted and {f = noted, m = {}}
  end
  return {f = epoch > 0 and epoch + cost(burst, limit, window) or 0, m = {}}
end

-- False where the org has no epoch yet.
local function read_epoch(key)
  epoch = tonumber(redis.call('GET', key))
  return epoch ~= nil
end

-- For what may not wait for an epoch: none means that it begins now.
local function assume_epoch(key)
  if not read_epoch(key) then
    epoch = now
  end
end

-- By key the scopes that are saved at the end of a script that works on many leases as one event; nil: each is saved at once.
local deferred

-- A scope without open leases and slices is forgotten when its buckets are full.
local function save_scope(key, scope)
  if deferred then
    deferred[key] = scope
    return
  end
  local longest = math.max(0, (scope.z or 0) - now)
  for kind, bucket in pairs(scope.b) do
    longest = math.max(longest, deficit(bucket))
    if scope.s == 0 then
      bucket.m = {}
    end
    if #bucket.m == 0 and deficit(bucket) == 0 then
      scope.b[kind] = nil
    end
  end
  for _, slice in pairs(scope.h or {}) do
    longest = longest + math.max(slice.x, slice.s > 0 and slice.l or 0) - now
    for _, amount in pairs(slice.u) do
      longest = longest + amount
    end
  end
  if scope.h and not next(scope.h) then
    scope.h = nil
  end
  local ttl_ms = math.ceil(longest / 1000)
  if scope.s == 0 then
    scope.n = 0
  else
    ttl_ms = math.max(ttl_ms, RECORD_TTL_MS)
  end
  if ttl_ms > 0 then
    redis.call('SET', key, cmsgpack.pack(scope), 'PX', ttl_ms)
  else
    redis.call('DEL', key)
  end
end

local function save_deferred()
  local scopes = deferred
  deferred = nil
  for key, scope in pairs(scopes) do
    save_scope(key, scope)
  end
end

-- By scope and kind: a day's bucket of which nothing is known; the books will have what is taken of it.
local strays = {}

local function bucket_of(scope, charge)
  local kind, limit, burst, window = unpack(charge)
  local others = strays[scope]
  local bucket = scope.b[kind] or others and others[kind]
  if not bucket then
    bucket = fresh(scope, kind, limit, burst, window)
    if bucket then
      scope.b[kind] = bucket
    else
      bucket = {f = 0, m = {}}
      others = others or {}
      others[kind], strays[scope] = bucket, others
    end
  end
  return bucket
end

local marked = {} -- by scope the kinds that are marked, where all that happens in a script is one event

-- Begin an event of a scope: while leases are open, what they may get back of `charges` is noted first. A bucket that
-- is not in `charges` is left alone by the event.
local function begin_event(scope, charges)
  local kinds = marked[scope]
  if not kinds then
    scope.n, kinds = scope.n + 1, {}
    if deferred then
      marked[scope] = kinds
    end
  end
  if scope.s > 0 then
    for _, charge in ipairs(charges) do
      if not kinds[charge[1]] then
        mark(bucket_of(scope, charge), scope.n)
        kinds[charge[1]] = true
      end
    end
  end
end

-- Of `charge`, `units` stay taken beyond the `kept` ones of before: the newest takes are given back first, and what is
-- missing is taken now.
local function adjust(scope, charge, units, kept)
  local _, limit, _, window, takes = unpack(charge)
  local bucket, left = bucket_of(scope, charge), cost(kept, limit, window) - cost(units, limit, window)
  for _, each in ipairs(takes) do
    left = left + each[2]
  end
  if left < 0 then
    take(bucket, -left)
    return
  end
  for i = #takes, 1, -1 do
    local part = math.min(left, takes[i][2])
    refund(bucket, takes[i][1], part)
    left = left - part
  end
end

-- In the counter of `post`, what its lease holds becomes `held` and what it has spent `nano`, but for what the counter had of
-- the books when it was built.
local function put(lease, post, held, nano)
  local mark = tonumber(redis.call('HGET', post[1], 'w'))
  if mark then
    local spent = lease.g and lease.g < mark and 0 or lease.n or nano
    local more = held + spent - post[2] - (post[4] == mark and post[3] or 0)
    if more ~= 0 then
      redis.call('HINCRBY', post[1], 'n', more)
    end
    post[3], post[4] = spent, mark
  end
  post[2] = held
end

-- The post of a lease for a counter; made where there is none.
local function post_of(lease, key)
  for _, post in ipairs(lease.m) do
    if post[1] == key then
      return post
    end
  end
  local post = {key, 0, 0, 0, 0}
  table.insert(lease.m, post)
  return post
end

-- What workers may use of a counter, by worker.
local function money_slices(key)
  local packed = redis.call('HGET', key, 'h')
  local found = packed and cmsgpack.unpack(packed) or {}
  for worker, slice in pairs(found) do
    if slice.x <= now then
      found[worker] = nil
    end
  end
  return found
end

-- Note among units that they are of a request that ran.
local function count_request(units)
  for kind, one in pairs(ONE_REQUEST) do
    units[kind] = one
  end
end

-- Close an open lease: of what it took, `used` stays taken.
local function close_lease(lease, used)
  local kept = lease.k or {}
  for _, part in ipairs(lease.c) do
    local key, charges = part[1], part[2]
    local scope = load_scope(key)
    begin_event(scope, charges)
    if scope.s > 0 then
      for _, charge in ipairs(charges) do
        adjust(scope, charge, used[charge[1]] or 0, kept[charge[1]] or 0)
      end
      scope.s = scope.s - 1
    end
    save_scope(key, scope)
  end
  for _, post in ipairs(lease.m) do
    put(lease, post, 0, used.m or 0)
  end
end

-- Take what a lease that has given back all but `kept` has used beyond that.
local function debit(lease, used, kept)
  for _, part in ipairs(lease.c) do
    local key, charges = part[1], part[2]
    local scope = load_scope(key)
    begin_event(scope, charges)
    for _, charge in ipairs(charges) do
      local kind, limit, _, window = unpack(charge)
      if not ONE_REQUEST[kind] and (used[kind] or 0) > (kept[kind] or 0) then
        take(bucket_of(scope, charge), cost(used[kind], limit, window) - cost(kept[kind] or 0, limit, window))
      end
    end
    save_scope(key, scope)
  end
  for _, post in ipairs(lease.m) do
    put(lease, post, 0, used.m or 0)
  end
end

local templates = {} -- by key

local function template_of(prefix, name)
  local parts = templates[name]
  if not parts then
    local packed = redis.call('GET', prefix .. name)
    parts = packed and cmsgpack.unpack(packed) or {}
    templates[name] = parts
  end
  return parts
end

-- A lease in full, however it is stored.
local function unpack_lease(prefix, packed)
  local lease = cmsgpack.unpack(packed)
  if lease.r then
    lease.c = {}
    for i, part in ipairs(template_of(prefix, lease.r)) do
      local charges = {}
      for j, each in ipairs(part[2]) do
        local kind, limit, burst, window = unpack(each)
        charges[j] = {kind, limit, burst, window, {{lease.e[i], cost(lease.a[kind] or 0, limit, window)}}}
      end
      lease.c[i] = {part[1], charges}
    end
    lease.r, lease.e, lease.a = nil, nil, nil
  end
  return lease
end

local function save_lease(prefix, lease_id, lease)
  redis.call('SET', prefix .. lease_id, cmsgpack.pack(lease), 'PX', RECORD_TTL_MS)
end

-- What is known of a lease, open or not; a settled one has `z`. nil: nothing.
local function record_of(prefix, lease_id)
  local packed = redis.call('GET', prefix .. lease_id)
  if packed == 'settled' then
    return {z = 1, m = {}}
  end
  return packed and unpack_lease(prefix, packed) or nil
end

-- For SETTLED_TTL_MS: nothing more is done for it, but that the books may say which counters have it.
local function bury(prefix, lease_id, lease)
  local record = 'settled'
  if #lease.m > 0 then
    record = cmsgpack.pack({z = 1, m = lease.m, g = lease.g})
  end
  redis.call('SET', prefix .. lease_id, record, 'PX', SETTLED_TTL_MS)
end

-- The record of a lease that is open; nil where there is none.
local function open_lease(leases_key, prefix, lease_id)
  if redis.call('ZSCORE', leases_key, lease_id) then
    local packed = redis.call('GET', prefix .. lease_id)
    return packed and unpack_lease(prefix, packed)
  end
end

-- Expired leases give back what they reserved and are not known to have used; their records stay, so that a late settle
-- can debit the difference.
local function heal(leases_key, prefix)
  local expired = redis.call('ZRANGEBYSCORE', leases_key, '-inf', now, 'LIMIT', 0, HEAL_BATCH)
  for _, lease_id in ipairs(expired) do
    redis.call('ZREM', leases_key, lease_id)
    local packed = redis.call('GET', prefix .. lease_id)
    if packed then
      local lease = unpack_lease(prefix, packed)
      count_request(lease.u)
      close_lease(lease, lease.u)
      lease.x = 1
      save_lease(prefix, lease_id, lease)
    end
  end
end
