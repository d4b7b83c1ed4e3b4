-- Exchange a worker's slices: take what it has used of them, open and close leases that it tells of, and grant what it wants.
--
-- KEYS  the org's open leases, prefix of lease keys, its epoch, the scopes
-- ARGV  msgpack of {worker, TTL of slices, TTL of leases (both microseconds), leases to close: ROWS of lease ids and units used,
--       leases to open: list of {places of their scopes, places of their counters, ROWS of lease ids and units}, by
--       scope {open leases it may have (-1: any number), list of {kind, limit, burst, window}, 1 if the worker holds a slice,
--       units that it keeps by kind, units that were used by kind, units that it wants beside by kind, requests that run on
--       the slice}, by counter {nano-USD of the cap, 1 if no more than the counter is funded with, 1 if the worker holds a slice,
--       nano-USD that it keeps for no request yet, that its requests hold, that it wants beside, share of this cell in millionths}, what requests have spent that
--       ran on the slice: list of {lease id, nano-USD, places of its counters}}; slots are units of kind 's', money of 'm'
-- ROWS  {list of kinds, flat list of an id and a number of units of each kind, and so on}: a table for each would take three times
--       as long to read
-- Returns {outcome, now, ids of leases that were not open}, and where it is done by scope {1 if nothing is there to be granted,
--       slots granted, then of each bucket units granted, and the moment at which it is full if others use their slices}, and by
--       counter {1 as for a scope, nano-USD granted, what is left under the cap (-1: nobody knows), 1 if it is to be topped up}
--       outcome 0: the org has no epoch; 1: done; 2: a slice is gone, and nothing was done

local leases_key, prefix = KEYS[1], KEYS[2]
local worker, slice_ttl, lease_ttl, closed, opened, asked, money, spent = unpack(cmsgpack.unpack(ARGV[1]))
if not read_epoch(KEYS[3]) then
  return {0, now, {}}
end
deferred = {}
heal(leases_key, prefix)

local scopes = {}
for i, each in ipairs(asked) do
  local scope = load_scope(KEYS[i + 3])
  scopes[i] = scope
  local held = scope.h and scope.h[worker]
  if each[3] == 1 and not (held and held.x > now) then
    save_deferred()
    return {2, now, {}}
  end
end

local slice_id = 'slice:' .. worker
local money_slice = #money > 0 and open_lease(leases_key, prefix, slice_id)
local counters = {}
for j, each in ipairs(money) do
  if each[3] == 1 and not money_slice then
    save_deferred()
    return {2, now, {}}
  end
  local key = KEYS[3 + #asked + j]
  local n, w, f, e, r, z, k = unpack(redis.call('HMGET', key, 'n', 'w', 'f', 'e', 'r', 'z', 'k'))
  counters[j] = {
    key = key, n = tonumber(n), mark = tonumber(w), funded = tonumber(f), expires = tonumber(e),
    refill = tonumber(r), scarce = tonumber(z) or 0, more = 0, booked = k
  }
end
money_slice = money_slice or {c = {}, m = {}, u = {}}

-- Lua passes no more than some thousands of arguments at once.
local MAX_AT_ONCE = 1000

local function call_in_parts(command, items)
  for first = 1, #items, MAX_AT_ONCE do
    redis.call(command, leases_key, unpack(items, first, math.min(#items, first + MAX_AT_ONCE - 1)))
  end
end

-- What leases give back, by scope, kind and the event at which it was taken: added up, so that each bucket is gone through
-- once for each event.
local refunds = {}

local function refunds_of(scope, charge)
  local of_scope = refunds[scope] or {}
  local of_kind = of_scope[charge[1]] or {bucket = bucket_of(scope, charge), by_event = {}}
  refunds[scope], of_scope[charge[1]] = of_scope, of_kind
  return of_kind
end

-- By name of a template, what each of its leases gives back is added to: by scope {scope, list of charges}.
local plans = {}

local function plan_of(name)
  local plan = plans[name]
  if not plan then
    plan = {}
    for i, part in ipairs(template_of(prefix, name)) do
      local key, limits = part[1], part[2]
      local scope, charges = load_scope(key), {}
      begin_event(scope, limits)
      for j, each in ipairs(limits) do
        local kind, limit, _, window = unpack(each)
        local of_kind = refunds_of(scope, each)
        local marks = of_kind.bucket.m
        charges[j] = {
          kind = kind, limit = limit, window = window, bucket = of_kind.bucket, by_event = of_kind.by_event,
          refills = #marks > 0 and marks[#marks][2] > 0
        }
      end
      save_scope(key, scope)
      plan[i] = {scope = scope, charges = charges}
    end
    plans[name] = plan
  end
  return plan
end

-- As `close_lease`, of a lease that is stored with a template.
local function close_compact(lease, used)
  for i, part in ipairs(plan_of(lease.r)) do
    local scope, event = part.scope, lease.e[i]
    if scope.s > 0 then
      for _, charge in ipairs(part.charges) do
        local reserved, taken = lease.a[charge.kind] or 0, used[charge.kind] or 0
        if taken > reserved then
          take(charge.bucket, cost(taken, charge.limit, charge.window) - cost(reserved, charge.limit, charge.window))
        elseif charge.refills then -- else it is full, and what is given back runs over
          local left = cost(reserved, charge.limit, charge.window) - cost(taken, charge.limit, charge.window)
          charge.by_event[event] = (charge.by_event[event] or 0) + left
        end
      end
      scope.s = scope.s - 1
    end
  end
  for _, post in ipairs(lease.m) do
    put(lease, post, 0, used.m or 0)
  end
end

local unknown, ended = {}, {}

local function close(lease_id, used)
  local packed = redis.call('GET', prefix .. lease_id)
  if packed == 'settled' then
    return
  end
  local lease = packed and cmsgpack.unpack(packed) or {q = 1}
  if lease.x or lease.q then
    table.insert(unknown, lease_id)
  elseif not lease.z then
    if lease.r then
      close_compact(lease, used)
    else
      close_lease(lease, used)
    end
    bury(prefix, lease_id, lease)
    table.insert(ended, lease_id)
  end
end

local kinds, rows = unpack(closed)
local used = {}
for at = 1, #rows, #kinds + 1 do
  for k, kind in ipairs(kinds) do
    used[kind] = rows[at + k]
  end
  close(rows[at], used)
end
for _, of_scope in pairs(refunds) do
  for _, of_kind in pairs(of_scope) do
    refund_all(of_kind.bucket, of_kind.by_event)
  end
end
call_in_parts('ZREM', ended)

local function limits_of(each)
  local found = {}
  for _, limit in ipairs(each[2]) do
    if limit[2] > 0 then
      table.insert(found, limit)
    end
  end
  return found
end

for i, scope in ipairs(scopes) do
  local limits, used = limits_of(asked[i]), asked[i][5]
  if next(used) or #opened > 0 then
    begin_event(scope, limits)
  end
  for _, each in ipairs(limits) do
    local units = used[each[1]] or 0
    if units > 0 then
      take(bucket_of(scope, each), cost(units, each[2], each[4]))
    end
  end
end

-- The name of the template of the leases at these places, which exists from then on.
local names = {}

local function name_of(places)
  local which = table.concat(places, ',')
  if not names[which] then
    local parts = {}
    for _, i in ipairs(places) do
      table.insert(parts, {KEYS[i + 3], limits_of(asked[i])})
    end
    local packed = cmsgpack.pack(parts)
    names[which] = 'charges:' .. redis.sha1hex(packed)
    redis.call('SET', prefix .. names[which], packed, 'PX', RECORD_TTL_MS)
  end
  return names[which]
end

local expiries, nothing = {}, {}

-- Open the leases of one group. All are opened by one event.
local function open(places, paying, kinds, rows)
  local name, number, events, charges = name_of(places), #rows / (#kinds + 1), {}, {}
  local place_of = {}
  for k, kind in ipairs(kinds) do
    place_of[kind] = k
  end
  for _, i in ipairs(places) do
    local scope = scopes[i]
    for _, limit in ipairs(asked[i][2]) do
      if limit[2] > 0 and place_of[limit[1]] then
        table.insert(charges, {bucket_of(scope, limit), place_of[limit[1]], limit[2], limit[4], 0})
      end
    end
    scope.s = scope.s + number
    table.insert(events, scope.n)
  end
  for at = 1, #rows, #kinds + 1 do
    local lease_id, units, posts = rows[at], {}, {}
    for k, kind in ipairs(kinds) do
      units[kind] = rows[at + k]
    end
    for _, charge in ipairs(charges) do
      charge[5] = charge[5] + cost(rows[at + charge[2]], charge[3], charge[4])
    end
    for i, j in ipairs(paying) do
      posts[i] = {counters[j].key, units.m, 0, 0, units.m}
      counters[j].more = counters[j].more + units.m
    end
    save_lease(prefix, lease_id, {r = name, e = events, a = units, m = posts, u = nothing, t = -1})
    table.insert(expiries, now + lease_ttl)
    table.insert(expiries, lease_id)
  end
  for _, charge in ipairs(charges) do
    take(charge[1], charge[5])
  end
end

for _, group in ipairs(opened) do
  open(group[1], group[2], unpack(group[3]))
end

-- Each is in the counters once, whoever tells of it: the record says it to the books.
for _, each in ipairs(spent) do
  local lease_id, nano, paying = unpack(each)
  local posts = {}
  for i, j in ipairs(paying) do
    local mark = counters[j].mark
    posts[i] = {counters[j].key, 0, mark and nano or 0, mark or 0, 0}
  end
  local record = cmsgpack.pack({z = 1, m = posts})
  if redis.call('SET', prefix .. lease_id, record, 'NX', 'PX', SETTLED_TTL_MS) then
    for _, j in ipairs(paying) do
      counters[j].more = counters[j].more + nano
    end
  else
    local lease = record_of(prefix, lease_id)
    if lease.q then
      for _, j in ipairs(paying) do
        put(lease, post_of(lease, counters[j].key), 0, nano)
      end
      bury(prefix, lease_id, lease)
    end
  end
end

-- How much of `wanted` may be leased beside what is `kept`, and whether the cap is near: no more than a quarter of what is
-- neither spent nor held by a request lies with workers. Second: what is left under the cap.
local function granted_money(counter, asks, others)
  local amount, funded, _, kept, young, wanted, share = unpack(asks)
  local most = amount
  if funded == 1 then
    most = (counter.expires or 0) > now + slice_ttl and math.min(amount, counter.funded) or 0
  end
  local left = of_cell(most, counter.booked, share) - counter.n - kept - young
  local room = math.floor((left + kept + others) / 4) - others - kept
  if counter.scarce > now or room < 0 then
    return 0, left, true
  end
  local found = math.max(0, math.min(wanted, room))
  return found, left - found, found < wanted and kept + found == 0
end

local answers = {}
for j, each in ipairs(money) do
  local counter, post = counters[j], post_of(money_slice, KEYS[3 + #asked + j])
  local _, funded, _, kept, young = unpack(each)
  local holds, answer = kept + young, {1, 0, -1, 0}
  if counter.mark then
    local slices, others = money_slices(counter.key), 0
    slices[worker] = nil
    for _, slice in pairs(slices) do
      others = others + slice.f
    end
    -- What was put straight into the counter is in it by now.
    counter.n = tonumber(redis.call('HGET', counter.key, 'n')) + counter.more - post[2]
    local found, left, is_low = granted_money(counter, each, others)
    local is_short = funded == 1 and left < (counter.refill or 0)
    answer = {is_low and 1 or 0, found, left, is_short and 1 or 0}
    holds = holds + found
    if holds > 0 then
      slices[worker] = {x = now + slice_ttl, f = kept + found}
    end
    if next(slices) then
      redis.call('HSET', counter.key, 'h', cmsgpack.pack(slices))
    else
      redis.call('HDEL', counter.key, 'h')
    end
    local more = counter.more + holds - post[2]
    if more ~= 0 then
      redis.call('HINCRBY', counter.key, 'n', more)
    end
  end
  post[2] = holds
  answers[j] = answer
end
if #money > 0 then
  local posts = {}
  for _, post in ipairs(money_slice.m) do
    if post[2] > 0 then
      table.insert(posts, post)
    end
  end
  if #posts > 0 then
    money_slice.m = posts
    save_lease(prefix, slice_id, money_slice)
    table.insert(expiries, now + lease_ttl)
    table.insert(expiries, slice_id)
  else
    redis.call('ZREM', leases_key, slice_id)
    redis.call('DEL', prefix .. slice_id)
  end
end
if #expiries > 0 then
  call_in_parts('ZADD', expiries)
  redis.call('PEXPIRE', leases_key, RECORD_TTL_MS)
end

-- How many of `wanted` units may be leased beside those that are `kept`, and whether the bucket is low: half of it stays free,
-- and no more than a quarter of it, or what refills in MAX_LEASED, lies with workers.
local MAX_LEASED = 2500000

local function granted(scope, limit, kept, wanted)
  local kind, most, burst, window = unpack(limit)
  local bucket = scope.b[kind] or fresh(scope, kind, most, burst, window)
  if not bucket then
    return 0, true
  end
  local full, out = cost(burst, most, window), leased(scope, kind) + cost(kept, most, window)
  local free = full / 2 - deficit(bucket) - out
  local room = math.min(free, math.min(full / 4, MAX_LEASED) - out)
  return math.max(0, math.min(wanted, math.floor(room * most / window))), free <= 0
end

local function granted_slots(scope, streams, kept, wanted)
  local out = leased_slots(scope) + kept
  local free = math.floor(streams / 2) - scope.s - out
  local room = math.min(free, math.floor(streams / 4) - out)
  return math.max(0, math.min(wanted, room)), free <= 0
end

local reply = {1, now, unknown}
for i, scope in ipairs(scopes) do
  local streams, limits, _, kept, _, wanted, young = unpack(asked[i])
  scope.h = scope.h or {}
  scope.h[worker] = nil
  local is_scarce = (scope.z or 0) > now
  local slice, holds, is_low = {x = now + slice_ttl, l = now + lease_ttl, y = young, s = 0, u = {}}, young > 0, is_scarce
  local slots, answer = 0, {0, 0}
  if streams >= 0 then
    local found, low = granted_slots(scope, streams, kept.s or 0, is_scarce and 0 or wanted.s or 0)
    slots, is_low = found, is_low or low
    slice.s = (kept.s or 0) + slots
    holds = holds or slice.s > 0
  end
  answer[2] = slots
  for _, limit in ipairs(limits) do
    local kind, most, _, window = unpack(limit)
    local units, full = 0, now
    if most > 0 then
      local keeps = kept[kind] or 0
      local found, low = granted(scope, limit, keeps, is_scarce and 0 or wanted[kind] or 0)
      units, is_low = found, is_low or low
      full = full_at(scope, kind, bucket_of(scope, limit))
      if keeps + units > 0 then
        slice.u[kind] = cost(keeps + units, most, window)
        holds = true
      end
    end
    table.insert(answer, units)
    table.insert(answer, full)
  end
  answer[1] = is_low and 1 or 0
  if holds then
    scope.h[worker] = slice
  end
  save_scope(KEYS[i + 3], scope)
  table.insert(reply, answer)
end
for _, answer in ipairs(answers) do
  table.insert(reply, answer)
end
save_deferred()
return reply
