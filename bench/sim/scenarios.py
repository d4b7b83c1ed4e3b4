"""Scenarios: who asks for what, and when.

Load is in parts of what the machine can do, about, by the cost model: 1 is all of it; so each
scenario is as hard on any machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.sim.admission import Rules
from bench.sim.cost import Cost
from bench.sim.world import Session, Setup, Turn
from engine.protocol import Lane
from engine.scheduling.step_costs import StepWork
from gateway.lanes import LaneDeadlines
from gateway.principal import Plan

LONG_PROMPT = 1_000_000
LONG_TIMES = 6
"""As long as it takes alone: beside decodes a long prompt has less than half of the machine."""
LONG_ANSWER = 64
GREEDY_SHARE = 0.2
OVERLOAD_DEADLINE_S = 2.0
NUM_CHATS = 8
"""Tenants that chat."""
_DAYS = 2


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    what: str
    sessions: list[Session]
    horizon_s: float
    setup: Setup
    without: list[Session] | None = None
    """The others, to be held against them beside what the scenario is about."""
    note: str = ""
    """A limit of the scenario that no scheduling order can change."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Sessions of some tenants, each as likely, that come at random."""

    lane: Lane
    tenants: tuple[str, ...]
    load: float
    draw: Callable[[random.Random], tuple[Turn, ...]]
    rate: Callable[[float], float] = lambda _: 1.0
    """Over the time, 0..1: the part of `load` that comes then."""

    def per_s(self, cost: Cost) -> float:
        """Sessions, at the full load."""
        rng = random.Random(0)
        drawn = [self.draw(rng) for _ in range(200)]
        return self.load * len(drawn) / sum(_session_s(cost, turns) for turns in drawn)

    def sessions(self, cost: Cost, rng: random.Random, horizon_s: float) -> Iterator[Session]:
        per_s, at_s = self.per_s(cost), 0.0
        while (at_s := at_s + rng.expovariate(per_s)) < horizon_s:
            tenant = rng.choice(self.tenants)
            if rng.random() < self.rate(at_s / horizon_s):
                yield Session(at_s, self.lane, tenant, self.draw(rng))


def _session_s(cost: Cost, turns: tuple[Turn, ...]) -> float:
    total_s, known = 0.0, 0
    for turn in turns:
        total_s += cost.request_s(turn.prompt, turn.answer, cached=known)
        known = turn.prompt
    return total_s


def _chat(rng: random.Random) -> tuple[Turn, ...]:
    return (Turn(rng.randint(32, 512), rng.randint(16, 128)),)


def _document(rng: random.Random) -> tuple[Turn, ...]:
    return (Turn(rng.randint(256, 1024), rng.randint(64, 256)),)


def _agent(rng: random.Random) -> tuple[Turn, ...]:
    """Each turn shows all that was said so far and a tool's result."""
    turns, known = [], 1500
    for _ in range(rng.randint(4, 12)):
        answer = rng.randint(20, 100)
        turns.append(Turn(known, answer, after_s=rng.uniform(0.1, 2.0)))
        known += answer + rng.randint(50, 600)
    return tuple(turns)


def _short(rng: random.Random) -> tuple[Turn, ...]:
    return (Turn(rng.randint(8, 24), 1),)


def _chats(load: float, rate: Callable[[float], float] | None = None) -> Stream:
    tenants = tuple(f"chat{number}" for number in range(NUM_CHATS))
    return Stream("interactive", tenants, load, _chat, rate or (lambda _: 1.0))


def _scenario(
    name: str,
    what: str,
    streams: list[Stream],
    cost: Cost,
    seed: int,
    *,
    num_sessions: int | None = None,
    horizon_s: float | None = None,
    setup: Setup | None = None,
) -> Scenario:
    """Either so many sessions or so long."""
    if horizon_s is None:
        assert num_sessions is not None, "neither a number nor a time"
        horizon_s = num_sessions / sum(stream.per_s(cost) for stream in streams)
    sessions: list[Session] = []
    for number, stream in enumerate(streams):
        sessions += stream.sessions(cost, random.Random(f"{seed} {name} {number}"), horizon_s)
    return Scenario(name, what, sessions, horizon_s, setup or Setup())


def flood(cost: Cost, seed: int, size: int) -> Scenario:
    batch = Stream("batch", ("flood",), 3.0, _document, lambda part: float(part > 0.1))
    what = "one tenant floods batch at 3 times the machine while eight chat at 0.3"
    return _scenario("flood", what, [_chats(0.3), batch], cost, seed, num_sessions=size)


def swarm(cost: Cost, seed: int, size: int) -> Scenario:
    agents = Stream("agentic", ("swarm",), 1.5, _agent)
    others = Stream("agentic", ("agent0", "agent1", "agent2"), 0.15, _agent)
    what = "one tenant's agents at 1.5 times the machine, three tenants' at 0.15, chats at 0.2"
    return _scenario("swarm", what, [_chats(0.2), agents, others], cost, seed, num_sessions=size)


def long_prompt(cost: Cost, seed: int, size: int, *, length: int = LONG_PROMPT) -> Scenario:
    """size is not looked at: there are as many chats as come while the prompt is computed."""
    alone_s = cost.request_s(length, LONG_ANSWER)
    setup = Setup(num_blocks=length // 16 + 8192, max_model_len=length + LONG_ANSWER)
    scenario = _scenario(
        f"long{length}",
        f"a prompt of {length:,} tokens among chats at 0.1",
        [_chats(0.1)],
        cost,
        seed,
        horizon_s=alone_s * LONG_TIMES,
        setup=setup,
    )
    writer = Session(alone_s * 0.05, "agentic", "writer", (Turn(length, LONG_ANSWER),))
    read_s, decode_s = cost.chunk_context_token_s * length, StepWork(1, 0, 256, 0.0).seconds(cost)
    return replace(
        scenario,
        sessions=[*scenario.sessions, writer],
        without=scenario.sessions,
        note=f"at its end a chunk of it takes {1000 * read_s:.1f} ms to read what comes before,"
        f" and a step without any {1000 * decode_s:.1f} ms",
    )


def long_100k(cost: Cost, seed: int, size: int) -> Scenario:
    return long_prompt(cost, seed, size, length=100_000)


def diurnal(cost: Cost, seed: int, size: int) -> Scenario:
    def day(part: float) -> float:
        return 0.55 - 0.45 * math.cos(2 * math.pi * _DAYS * part)

    streams = [
        _chats(1.2, day),
        Stream("agentic", ("agent0", "agent1"), 0.2, _agent),
        Stream("batch", ("night0", "night1"), 0.3, _document),
    ]
    what = "two days: chats from 0.12 to 1.2 of the machine, agents at 0.2, batch at 0.3"
    return _scenario("diurnal", what, streams, cost, seed, num_sessions=size)


def budget(cost: Cost, seed: int, size: int) -> Scenario:
    """A tenant in the lane of the others, who may have a part of the machine."""
    greedy = Stream("interactive", ("greedy",), 3.0, _document)
    plan = Plan(name="greedy", tokens_per_minute=_tokens_per_minute(cost, greedy, GREEDY_SHARE))
    what = f"one asks for 3 times the machine on a plan for {GREEDY_SHARE} of it, eight chat at 0.3"
    setup = Setup(rules=Rules({"greedy": plan}))
    streams = [_chats(0.3), greedy]
    return _scenario("budget", what, streams, cost, seed, num_sessions=size, setup=setup)


def overload(cost: Cost, seed: int, size: int) -> Scenario:
    deadlines = LaneDeadlines(interactive=OVERLOAD_DEADLINE_S)
    what = f"chats at 1.5 times the machine, who want a first token within {OVERLOAD_DEADLINE_S} s"
    streams = [_chats(1.5), Stream("batch", ("night",), 0.3, _document)]
    setup = Setup(rules=Rules({}, deadlines))
    return _scenario("overload", what, streams, cost, seed, num_sessions=size, setup=setup)


def _tokens_per_minute(cost: Cost, stream: Stream, share: float) -> int:
    rng = random.Random(0)
    drawn = [sum(turn.prompt + turn.answer for turn in stream.draw(rng)) for _ in range(200)]
    return int(60 * stream.per_s(cost) / stream.load * share * sum(drawn) / len(drawn))


def short(cost: Cost, seed: int, size: int) -> Scenario:
    """For the speed of the simulator itself, admission and all."""
    tenants = tuple(f"chat{n}" for n in range(NUM_CHATS))
    stream = Stream("interactive", tenants, 0.9, _short)
    what = "prompts of 8 to 24 tokens, answers of one, at 0.9 of the machine"
    plan = Plan(name="large", tokens_per_minute=10**9, requests_per_minute=10**7)
    setup = Setup(rules=Rules(dict.fromkeys(tenants, plan)))
    return _scenario("short", what, [stream], cost, seed, num_sessions=size, setup=setup)


SCENARIOS: dict[str, Callable[[Cost, int, int], Scenario]] = {
    "flood": flood,
    "swarm": swarm,
    "long": long_prompt,
    "long-100k": long_100k,
    "diurnal": diurnal,
    "budget": budget,
    "overload": overload,
}
