"""Many refunds of a bucket in one walk leave what they leave one by one."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import redis.asyncio

from gateway.limits.redis import scripts

CASES = 400
COMPARE = """
local found = {}
for _, case in ipairs(cmsgpack.unpack(ARGV[1])) do
  local lows, refunds = unpack(case)
  local one, other, by_event = {f = now, m = {}}, {f = now, m = {}}, {}
  for _, pair in ipairs(lows) do
    table.insert(one.m, {pair[1], pair[2]})
    table.insert(other.m, {pair[1], pair[2]})
  end
  for _, each in ipairs(refunds) do
    refund(one, each[1], each[2])
    by_event[each[1]] = each[2]
  end
  refund_all(other, by_event)
  table.insert(found, {one.f - now, one.m, other.f - now, other.m})
end
return cmsgpack.pack(found)
"""


async def test_many_refunds_at_once_leave_what_one_by_one_leaves(
    redis: redis.asyncio.Redis,
) -> None:
    draw, cases = random.Random(1), []
    for _ in range(CASES):
        number = draw.randrange(1, 12)
        events = sorted(draw.sample(range(1, 40), number))
        lows = sorted(draw.sample(range(0, 1000), number))
        refunded = sorted(draw.sample(range(1, 41), draw.randrange(1, 9)))
        refunds = [(event, draw.randrange(0, 400)) for event in refunded]
        cases.append((list(zip(events, lows, strict=True)), refunds))
    text = (Path(scripts.__file__).parent / "ledger.lua").read_text()
    reply = await redis.eval(
        "local ONE_REQUEST = {}\n" + text + COMPARE, 0, msgspec.msgpack.encode(cases)
    )  # type: ignore[misc]
    changed = 0
    for alone_f, alone_m, f, m in msgspec.msgpack.decode(reply):
        assert (f, m) == (alone_f, alone_m)
        changed += f != 0
    assert changed > CASES / 4
