-- Settle a lease with what was used, once.
--
-- KEYS  the org's open leases, prefix of lease keys, then the scopes to debit if the lease has left no record
-- ARGV  lease id, tokens used, 1 if the request itself counts (0: void), then per scope: tokens per minute
-- Returns 0 settled before, nothing was done; 1 settled; 2 it had expired and was debited; 3 nothing is known of it

local leases_key, prefix = KEYS[1], KEYS[2]
local lease_id, used, keep_request = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'
heal(leases_key, prefix)

local function debit(key, tpm)
  if tpm > 0 and used > 0 then
    local scope = load_scope(key)
    begin_event(scope)
    take(scope.t, cost(used, tpm))
    save_scope(key, scope)
  end
end

local outcome
local packed = redis.call('GET', prefix .. lease_id)
if packed == 'settled' then
  return 0
elseif not packed then
  outcome = 3
  for i = 3, #KEYS do
    debit(KEYS[i], tonumber(ARGV[i + 1]))
    outcome = 2
  end
else
  local lease = cmsgpack.unpack(packed)
  if lease.x then
    outcome = 2
    for _, charge in ipairs(lease.c) do
      debit(charge[1], charge[3])
    end
  else
    outcome = 1
    close_lease(lease, used, keep_request)
    redis.call('ZREM', leases_key, lease_id)
  end
end
redis.call('SET', prefix .. lease_id, 'settled', 'PX', SETTLED_TTL_MS)
return outcome
