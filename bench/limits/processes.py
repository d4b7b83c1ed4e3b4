"""Several processes that share the limits of one organization, one of them killed in the middle."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis, from_url

from bench.limits import windows
from bench.limits.journal import Request, Story, read
from bench.limits.load import GO, Load, now_us
from bench.limits.tenant import DAY, DAY_TOKENS, MODELS, ORG, callers
from gateway.limits.limiter import MAX_AHEAD_TOKENS, Limiter
from gateway.limits.outcomes import Admission, Settlement, Units, scopes_of
from gateway.limits.redis.keys import org_keys, scope_keys
from gateway.limits.redis.scope_limits import BucketLimit
from gateway.principal import DAY_US, MINUTE_US, Principal

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 4
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
BUSY_TIMEOUT_S = 5.0
MIN_LEFT = 2
"""Requests that the killed process leaves open."""
HEAD_START = 60_000
"""Tokens of the day that are used before all else: a minute of refill, so that its bucket is never
full again and what it holds is the sum of what was used."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    concurrency: int
    """Requests at once, of all processes together."""
    scale: int
    """The factor on the limits (`tenant`)."""
    seconds: float
    lease_ttl_s: float
    killed_after_s: float
    await_expiry: bool
    """Whether the killed one's leases expire before they are recovered."""
    with_slices: bool = False
    """Whether they hold slices; then nobody knows to the token what the killed one had used."""

    @property
    def max_streams(self) -> int:
        """With slices more than are asked for: of what is nearly used up nobody gets any."""
        return self.concurrency * 4 if self.with_slices else self.concurrency * 3 // 4

    def callers(self) -> list[Principal]:
        return callers(self.scale, self.max_streams)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The ratios of what passed to its bound, over every window of the run."""

    admitted_ratio: float
    """The worst of all scopes and kinds: what was reserved and used, against B + r t."""
    with_steps_ratio: float
    """The same with what was written beyond reservations, against 2 B + r t + 64 for each stream.
    """
    ratios: dict[str, float]
    """The first, by scope and kind."""
    streams_ratio: float
    """Open at once, against the limit."""
    admitted: int
    refused: int
    replayed: int
    replays_of_ended: tuple[int, int]
    """Asked for, refused."""
    double_settles: tuple[int, int]
    of_slices: int
    extended: int
    rested: int
    recovered: dict[str, int]
    """Leases of the killed process, by what their settlement found."""
    unknown_tokens: int
    """Tokens that the killed process had not reported when its leases expired: they are debited
    late."""
    miscounted_us: int
    """The error of the org's daily bucket, beyond the use of all requests."""


def run(url: str, folder: Path, scenario: Scenario) -> Outcome:
    return asyncio.run(_run(url, folder, scenario))


async def _run(url: str, folder: Path, scenario: Scenario) -> Outcome:
    redis = from_url(url)
    await redis.flushall()
    first_us = await head_start(redis)
    paths = [folder / f"{scenario.concurrency}-{number}.jsonl" for number in range(NUM_PROCESSES)]
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(command(url, p, scenario))) for p in paths]
        for each in started:
            stack.callback(each.kill)
        await until_ready(started, paths)
        await redis.set(GO, 1)
        await asyncio.sleep(scenario.killed_after_s)
        victim = await busiest(paths)
        started[victim].send_signal(signal.SIGKILL)
        killed_us = now_us()
        codes = [
            await asyncio.to_thread(each.wait, scenario.seconds + STOP_TIMEOUT_S)
            for each in started
        ]
    if codes.pop(victim) != -signal.SIGKILL or any(codes):
        raise RuntimeError(f"the processes ended with {codes}")
    stories = [read(path) for path in paths]
    if scenario.await_expiry:
        left_s = scenario.lease_ttl_s - (now_us() - killed_us) / 1_000_000
        await asyncio.sleep(max(0.0, left_s) + 0.1)
    unknown, recovered = await recover(redis, stories[victim])
    outcome = await judge(redis, scenario, stories, killed_us, first_us, unknown, recovered)
    await redis.aclose()
    return outcome


def command(url: str, path: Path, scenario: Scenario) -> list[str]:
    load = Load(
        url=url,
        journal=str(path),
        name=path.stem,
        scale=scenario.scale,
        max_streams=scenario.max_streams,
        num_slots=scenario.concurrency // NUM_PROCESSES,
        seconds=scenario.seconds,
        lease_ttl_s=scenario.lease_ttl_s,
        with_slices=scenario.with_slices,
    )
    return [sys.executable, "-m", "bench.limits.load", msgspec.json.encode(load).decode()]


async def until_ready(started: list[subprocess.Popen[bytes]], paths: list[Path]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not all(path.exists() and read(path).is_ready for path in paths):
        if time.monotonic() > deadline or any(each.poll() is not None for each in started):
            raise RuntimeError("a process did not start")
        await asyncio.sleep(0.05)


async def busiest(paths: list[Path]) -> int:
    """The process whose death leaves most behind; not before that is something."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while time.monotonic() < deadline:
        left = [sum(each.ends is None for each in read(path).requests.values()) for path in paths]
        if max(left) >= MIN_LEFT:
            return left.index(max(left))
        await asyncio.sleep(0.02)
    raise RuntimeError("nobody has anything to do")


async def head_start(redis: Redis) -> int:
    """Redis' time of it."""
    limiter = Limiter(redis)
    who = Principal(
        org_id=ORG, project_id="p", key_id="k", key_hint="", scopes=frozenset(), org_plan=DAY
    )
    admission = await limiter.admit(
        who,
        "m",
        input_tokens=HEAD_START,
        max_output_tokens=0,
        lease_id="head start",
        lane="batch",
    )
    if not isinstance(admission, Admission):
        raise RuntimeError("the bucket of the day is not empty")
    await limiter.settle(admission, Units(input_tokens=HEAD_START))
    await limiter.close()
    return await day_full_at_us(redis) - HEAD_START * DAY_US // DAY_TOKENS


async def day_full_at_us(redis: Redis) -> int:
    packed: Any = await redis.get(f"tollgate:{{{ORG}}}:org:{ORG}")
    return int(msgspec.msgpack.decode(packed)["b"]["d"]["f"])


async def recover(redis: Redis, dead: Story) -> tuple[dict[str, int], dict[str, int]]:
    """Settle what the killed process left, as its spool's recovery does, and once more. By lease,
    tokens that its expiry did not know of; by what was found, how many there were."""
    limiter = Limiter(redis)
    unknown: dict[str, int] = {}
    found: dict[str, int] = {}
    records = await records_of(redis, [*dead.requests])

    async def settle(lease_id: str, used: Units) -> None:
        settled = await limiter.settle_lease(ORG, lease_id, used)
        found[settled.name] = found.get(settled.name, 0) + 1
        if settled is Settlement.LATE:
            told = msgspec.msgpack.decode(records[lease_id])["u"].get("t", 0)
            unknown[lease_id] = max(0, used.tokens - told)
        again = await limiter.settle_lease(ORG, lease_id, Units(output_tokens=10**6))
        if again is not Settlement.REPLAYED:
            raise RuntimeError(f"{lease_id} was settled twice: {again}")

    await asyncio.gather(*(settle(name, each.used) for name, each in dead.requests.items()))
    # What was killed between its admission and its first line ran nowhere.
    left: Any = await redis.zrange(org_keys(ORG)[0], 0, -1)
    for lease_id in left:
        await settle(lease_id.decode(), Units())
    await limiter.close()
    return unknown, found


async def records_of(redis: Redis, lease_ids: list[str]) -> dict[str, bytes]:
    prefix = org_keys(ORG)[1]
    packed: Any = await redis.mget([prefix + lease_id for lease_id in lease_ids])
    return dict(zip(lease_ids, packed, strict=True))


async def judge(
    redis: Redis,
    scenario: Scenario,
    stories: list[Story],
    killed_us: int,
    first_us: int,
    unknown: dict[str, int],
    recovered: dict[str, int],
) -> Outcome:
    requests = {name: each for story in stories for name, each in story.requests.items()}
    counted = [story.counted for story in stories if story.counted is not None]
    ratios, with_steps = {}, 0.0
    by_bucket = list(buckets(scenario, requests, unknown))
    for name, bucket, at_admission, in_all in by_bucket:
        ratios[name] = ratio(at_admission, bucket, base=bucket.burst)
        ahead = scenario.concurrency * MAX_AHEAD_TOKENS
        with_steps = max(with_steps, ratio(in_all, bucket, base=2 * bucket.burst + ahead))
    spans = [
        (each.admitted.at_us, killed_us if each.ends is None else each.ends.at_us)
        for each in requests.values()
    ]
    used = sum(each.used.tokens for each in requests.values())
    owed_us = (HEAD_START + used) * DAY_US // DAY_TOKENS
    return Outcome(
        admitted_ratio=max(ratios.values()),
        with_steps_ratio=with_steps,
        ratios=ratios,
        streams_ratio=windows.most_at_once(spans) / scenario.max_streams,
        admitted=len(requests),
        refused=sum(each.refused for each in counted),
        replayed=sum(each.replayed for each in counted),
        replays_of_ended=(
            sum(each.settled_twice for each in counted) // 4,
            sum(each.replay_refused for each in counted),
        ),
        double_settles=(
            sum(each.settled_twice for each in counted),
            sum(each.double_refused for each in counted),
        ),
        of_slices=sum(each.of_slices for each in counted),
        extended=sum(each.extended for each in counted),
        rested=sum(each.rested for each in counted),
        recovered=recovered,
        unknown_tokens=sum(unknown.values()),
        miscounted_us=await day_full_at_us(redis) - first_us - owed_us,
    )


Events = list[tuple[int, int]]


def buckets(
    scenario: Scenario, requests: dict[str, Request], unknown: dict[str, int]
) -> Iterator[tuple[str, BucketLimit, Events, Events]]:
    """Each bucket of a minute, by the name of its scope and its kind: what it let pass when, at
    admission, and with what was written beyond reservations."""
    known = {(each.key_id, model): each for each in scenario.callers() for model in MODELS}
    found: dict[str, tuple[BucketLimit, Events, Events]] = {}
    for lease_id, request in requests.items():
        said = request.admitted
        scopes = scopes_of(known[said.who, said.model], said.model, "batch")
        first, later = passed(request, unknown.get(lease_id, 0))
        for scope, key in zip(scopes, scope_keys(ORG, scopes), strict=True):
            for bucket in scope.buckets:
                if bucket.window_us == MINUTE_US:
                    name = f"{key.partition('}:')[2]} {bucket.letter}"
                    name = name.replace(f"org:{ORG} ", "org ")
                    _, at_admission, in_all = found.setdefault(name, (bucket, [], []))
                    at_admission.append((said.at_us, first[bucket.letter]))
                    in_all.append(at_admission[-1])
                    if bucket.letter in "to":
                        in_all += later
    for name, (bucket, at_admission, in_all) in found.items():
        yield name, bucket, at_admission, in_all


def passed(request: Request, unknown: int) -> tuple[dict[str, int], Events]:
    """By kind, what was reserved and used; and what was written beyond that, when. What an expiry
    did not know of counts for neither: it was debited later."""
    if request.ends is not None and request.ends.voided:
        return dict.fromkeys("tior", 0), []
    said, left, later = request.admitted, request.admitted.output_tokens, []
    written = request.used.output_tokens - unknown
    for each in request.wrote:
        tokens = min(each.tokens, written)
        written -= tokens
        beyond = max(0, tokens - left)
        left -= tokens - beyond
        if beyond:
            later.append((each.at_us, beyond))
    output = said.output_tokens - left
    tokens = said.input_tokens + output + min(0, written)
    return {"t": tokens, "i": said.input_tokens, "o": output, "r": 1}, later


def ratio(events: Events, bucket: BucketLimit, *, base: int) -> float:
    return windows.worst_ratio(
        events, base=base, limit=bucket.limit, longest_us=MINUTE_US, minute_us=MINUTE_US
    )
