"""Measures what limits cost Redis: scripts and processor time a request, by the exact path alone
and with slices, and how many requests of one organization one Redis takes."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from typing import Any

import msgspec
from redis.asyncio import Redis, from_url

from billing.events import Price, PriceSet
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Units, scopes_of
from gateway.limits.redis.keys import epoch_key, org_keys, scope_keys
from gateway.limits.redis.local_buckets import LocalBuckets
from gateway.limits.redis.outage import ScriptCall
from gateway.limits.redis.scripts import Scripts
from gateway.limits.slices.ledger import YOUNG_S
from gateway.limits.slices.slices import Slices
from gateway.limits.spending import MAX_NANO
from gateway.principal import UNLIMITED, Plan, Principal, SpendCap

NUM_GATEWAYS = 4
NUM_FLOODING = 8
FEW, MANY = 24, 200
"""Requests at once, of each gateway."""
INPUT_TOKENS, OUTPUT_TOKENS = (20, 400), (10, 200)
NEAR_LIMIT, SHARE_OF_LIMIT = 3_000_000, 0.9
"""Tokens a minute, and how much of them is asked for."""
AT_ONCE = 16
"""Requests of a flood between two turns of the event loop."""
GROWS_S = 2 * YOUNG_S
LEASE_TTL_S = 60.0
PRICES: PriceSet = {
    "uncached_input": Price("m:uncached_input", 2_000),
    "output": Price("m:output", 10_000),
}
PLAN = Plan(
    name="bench",
    tokens_per_minute=4_000_000_000,
    requests_per_minute=12_000_000,
    max_concurrent_streams=400_000,
)


class Trips(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    refused: int
    requests_per_s: float
    scripts_per_request: float
    redis_us_per_request: float
    """Processor time of Redis' main thread."""


def caller(number: int) -> Principal:
    return Principal(
        org_id="org_trips",
        project_id="proj_trips",
        key_id=f"key_{number}",
        key_hint="",
        scopes=frozenset(),
        key_plan=PLAN,
        project_plan=PLAN,
        org_plan=PLAN,
    )


class Meter:
    """Reads what Redis has done between its making and `read`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def begin(self) -> None:
        await self._redis.config_resetstat()
        self._cpu_s, self._at = await self._cpu(), time.monotonic()

    async def _cpu(self) -> float:
        info: Any = await self._redis.info("cpu")
        return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])

    async def read(self, requests: int, refused: int) -> Trips:
        elapsed_s, cpu_s = time.monotonic() - self._at, await self._cpu() - self._cpu_s
        stats: Any = await self._redis.info("commandstats")
        calls = [stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval")]
        return Trips(
            requests=requests,
            refused=refused,
            requests_per_s=requests / elapsed_s,
            scripts_per_request=sum(calls) / requests,
            redis_us_per_request=cpu_s / requests * 1e6,
        )


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way of serving. `longest_s`: a request runs for as long at most. `clients`: requests at
    once, of each gateway. `capped`: each has a hard cap to spend under."""

    slices: bool
    longest_s: float
    clients: int = FEW
    capped: bool = False


async def serve(url: str, seconds: float, way: Way) -> Trips:
    """Serve requests on limiters as gateways have them."""
    longest_s = way.longest_s
    redis = from_url(url)
    await redis.flushall()
    stores = [from_url(url) for _ in range(NUM_GATEWAYS)]
    limiters = [Limiter(each) for each in stores]
    draw, counts, ends_at = random.Random(1), [0, 0], time.monotonic() + longest_s + seconds
    callers = [caller(number) for number in range(8)]
    if way.capped:
        cap = SpendCap("org", "org_trips", "total", MAX_NANO)
        callers = [msgspec.structs.replace(each, spend_caps=(cap,)) for each in callers]

    async def client(limiter: Limiter, name: str) -> None:
        number = 0
        while time.monotonic() < ends_at:
            number += 1
            tokens, written = draw.randint(*INPUT_TOKENS), draw.randint(*OUTPUT_TOKENS)
            verdict = await limiter.admit(
                draw.choice(callers),
                "m",
                input_tokens=tokens,
                max_output_tokens=OUTPUT_TOKENS[1],
                lease_id=f"{name}-{number}",
                prices=PRICES,
            )
            if isinstance(verdict, Admission):
                counts[0] += 1
                await asyncio.sleep(draw.uniform(0, longest_s))
                spent = verdict.spending.cost_nano(tokens, written) if verdict.spending else 0
                used = Units(input_tokens=tokens, output_tokens=written, cost_nano=spent)
                await limiter.settle(verdict, used)
            else:
                counts[1] += 1

    for limiter in limiters:
        if way.slices:
            await limiter.start()
    meter = Meter(redis)
    serving = asyncio.gather(
        *(client(each, f"{g}-{c}") for g, each in enumerate(limiters) for c in range(way.clients))
    )
    await asyncio.sleep(longest_s)  # until they do not begin all at once any more
    counts[:] = 0, 0
    await meter.begin()
    await asyncio.sleep(seconds)
    found = await meter.read(*counts)
    await serving
    for limiter in limiters:
        await limiter.close()
    for store in (*stores, redis):
        await store.aclose()
    return found


async def flood(url: str, seconds: float, *, open_share: float = 0.0) -> Trips:
    """Let simulated gateways, which do nothing else, admit and settle as fast as one core does.
    `open_share`: of the requests so many outlive YOUNG_S and become leases. Those that slices have
    nothing for are refused here; gateways would ask Redis for each."""
    redis = from_url(url)
    await redis.flushall()
    await redis.set(epoch_key("org_trips"), 0)
    stores = [from_url(url) for _ in range(NUM_FLOODING)]
    gateways = [simulated(store) for store in stores]
    draw, admitted, refused = random.Random(1), 0, 0
    scopes = [scopes_of(caller(number), "m", "interactive") for number in range(8)]
    asked = [(scope_keys("org_trips", each), each) for each in scopes]
    meter = Meter(redis)
    begins_at, number = time.monotonic() + GROWS_S, 0  # when slices are as large as they get
    ends_at, has_begun = begins_at + seconds, False
    held = deque[tuple[float, Slices, str]]()
    while (now := time.monotonic()) < ends_at:
        if now >= begins_at and not has_begun:
            admitted, refused, has_begun = 0, 0, True
            await meter.begin()
        for gateway in gateways:
            for _ in range(AT_ONCE):
                number += 1
                lease_id = str(number)
                keys, limits = asked[number % len(asked)]
                units = Units(input_tokens=300, output_tokens=200).by_letter(requests=1)
                if isinstance(gateway.admit("org_trips", lease_id, keys, limits, units), str):
                    if gateway.count("org_trips"):
                        gateway.note("org_trips", keys, limits, units)
                    refused += 1
                    continue
                admitted += 1
                if draw.random() < open_share:
                    held.append((now + 1.5 * YOUNG_S, gateway, lease_id))
                else:
                    settle(gateway, lease_id, 350)
        while held and held[0][0] < now:
            _, gateway, lease_id = held.popleft()
            settle(gateway, lease_id, 350)
        await asyncio.sleep(0)
    found = await meter.read(admitted, refused)
    for gateway in gateways:
        await gateway.close()
    for store in (*stores, redis):
        await store.aclose()
    return found


class NearLimit(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    refused: int
    wrongly_refused_share: float
    """The share that was refused though one bucket, asked by all, had room for it."""
    slices_share: float
    """The share of what passed that Redis was not asked for."""


async def near_limit(url: str, seconds: float) -> NearLimit:
    """Ask for nine tenths of an organization's limit, at moments that nobody chose."""
    redis = from_url(url)
    await redis.flushall()
    stores = [from_url(url) for _ in range(NUM_GATEWAYS)]
    limiters = [Limiter(each) for each in stores]
    for limiter in limiters:
        await limiter.start()
    plan = Plan(name="near", tokens_per_minute=NEAR_LIMIT)
    who = msgspec.structs.replace(
        caller(0), key_plan=UNLIMITED, project_plan=UNLIMITED, org_plan=plan
    )
    scopes = scopes_of(who, "m", "interactive")
    keys, one = scope_keys(who.org_id, scopes), LocalBuckets(share=1.0, burst_parts=1)
    draw, tasks = random.Random(1), set[asyncio.Task[None]]()
    total = refused = wrongly = of_slices = 0

    async def request(number: int, tokens: int, *, fits: bool) -> None:
        nonlocal refused, wrongly, of_slices
        limiter = limiters[number % NUM_GATEWAYS]
        asked = {"input_tokens": tokens, "max_output_tokens": 0, "lease_id": f"near-{number}"}
        verdict = await limiter.admit(who, "m", **asked)  # type: ignore[arg-type]
        if isinstance(verdict, Admission):
            of_slices += verdict.is_of_slices
            await asyncio.sleep(draw.uniform(0, 2.0))
            await limiter.settle(verdict, Units(input_tokens=tokens))
        else:
            refused += 1
            wrongly += fits

    mean = sum(INPUT_TOKENS) / 2
    per_s = SHARE_OF_LIMIT * NEAR_LIMIT / 60 / mean
    began = due = time.monotonic()
    while due < began + seconds:
        due += draw.expovariate(per_s)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tokens = draw.randint(*INPUT_TOKENS)
        units = Units(input_tokens=tokens).by_letter(requests=1)
        fits = one.admit(keys, scopes, units) is None
        tasks.add(asyncio.create_task(request(total, tokens, fits=fits)))
        total += 1
    await asyncio.gather(*tasks)
    for limiter in limiters:
        await limiter.close()
    for store in (*stores, redis):
        await store.aclose()
    return NearLimit(
        requests=total,
        refused=refused,
        wrongly_refused_share=wrongly / total,
        slices_share=of_slices / max(1, total - refused),
    )


def simulated(store: Redis) -> Slices:
    made = Slices(
        Scripts(store),
        defer=lambda lease_id, call: None,
        on_lost=lambda: None,
        lease_ttl_s=lambda: LEASE_TTL_S,
    )
    made.start()
    return made


def settle(gateway: Slices, lease_id: str, tokens: int) -> None:
    used = Units(input_tokens=tokens).by_letter(requests=1)
    keys = org_keys("org_trips")
    gateway.settle(
        "org_trips", lease_id, used, lambda units: ScriptCall(keys, (lease_id, units, []))
    )


def run(url: str, seconds: float) -> dict[str, Trips]:
    """Return what each way of serving costs."""
    found = {}
    for name, way in WAYS.items():
        found[name] = asyncio.run(serve(url, seconds, way))
    found["one org, short"] = asyncio.run(flood(url, seconds))
    found["one org, half leases"] = asyncio.run(flood(url, seconds, open_share=0.5))
    return found


WAYS = {
    "exact, short": Way(slices=False, longest_s=0.05),
    "slices, short": Way(slices=True, longest_s=0.05),
    "exact, capped": Way(slices=False, longest_s=0.05, capped=True),
    "slices, capped": Way(slices=True, longest_s=0.05, capped=True),
    "exact, 3 s, few": Way(slices=False, longest_s=3.0),
    "slices, 3 s, few": Way(slices=True, longest_s=3.0),
    "exact, 3 s, many": Way(slices=False, longest_s=3.0, clients=MANY),
    "slices, 3 s, many": Way(slices=True, longest_s=3.0, clients=MANY),
}
