-- Read how full scopes are, and what open leases hold of them. Nothing changes: expired leases are passed over, not healed.
--
-- KEYS  the org's open leases (sorted set: id -> expiry), prefix of lease keys, its epoch, the scopes
-- ARGV  msgpack of {scopes as `admit` has them, how many leases are read at most}
-- Returns {now, open leases, then per scope: its open leases, and of each bucket its full moment (-1: nobody knows) and how
--       much of its refill is held}

local leases_key, prefix = KEYS[1], KEYS[2]
local asked, most = unpack(cmsgpack.unpack(ARGV[1]))
if not read_epoch(KEYS[3]) then
  epoch = 0
end

local held, num_slices = {}, 0
for _, lease_id in ipairs(redis.call('ZRANGEBYSCORE', leases_key, now, '+inf', 'LIMIT', 0, most)) do
  if string.sub(lease_id, 1, 6) == 'slice:' then
    num_slices = num_slices + 1
  end
  local packed = redis.call('GET', prefix .. lease_id)
  local lease = packed and packed ~= 'settled' and unpack_lease(prefix, packed) or {}
  for _, part in ipairs(lease.c or {}) do
    local of_scope = held[part[1]] or {}
    held[part[1]] = of_scope
    for _, charge in ipairs(part[2]) do
      local kind, limit, _, window, takes = unpack(charge)
      local left = -cost(lease.u[kind] or 0, limit, window)
      for _, each in ipairs(takes) do
        left = left + each[2]
      end
      of_scope[kind] = (of_scope[kind] or 0) + math.max(0, left)
    end
  end
end

-- The requests that run without a lease.
local function young(scope)
  local number = 0
  for _, slice in pairs(scope.h or {}) do
    number = number + slice.y
  end
  return number
end

local most_young = 0
for i = 1, #asked do
  most_young = math.max(most_young, young(load_scope(KEYS[i + 3])))
end

local reply = {now, redis.call('ZCOUNT', leases_key, now, '+inf') - num_slices + most_young}
for i, each in ipairs(asked) do
  local scope = load_scope(KEYS[i + 3])
  local of_scope = held[KEYS[i + 3]] or {}
  table.insert(reply, scope.s + young(scope))
  for _, bucket in ipairs(each[2]) do
    local kind, limit, burst, window = unpack(bucket)
    local found = scope.b[kind] or (limit > 0 and fresh(scope, kind, limit, burst, window))
    table.insert(reply, found and full_at(scope, kind, found) or -1)
    table.insert(reply, (of_scope[kind] or 0) + leased(scope, kind))
  end
end
return reply
