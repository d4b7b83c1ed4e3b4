-- What stands against a counter of attempt.lua, without charging it.
--
-- KEYS[1]: the counter's hash.
-- Returns {how long to wait in ms, attempts so far}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local limit = tonumber(redis.call('HGET', KEYS[1], 'until') or '0')
return {math.max(0, limit - now), tonumber(redis.call('HGET', KEYS[1], 'n') or '0')}
