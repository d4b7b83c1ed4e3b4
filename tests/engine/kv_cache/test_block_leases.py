"""Checks what is kept of prompts for a time: who is promised what, what goes first, and that
whoever was told nothing else finds what he paid for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import InvalidRequest
from engine.kv_cache.block_leases import CacheLeases
from engine.protocol import Breakpoint, EngineRequest, LeaseEnded, LeaseGranted, Usage
from engine.scheduling.scheduler import Scheduler
from tests.budget import examples
from tests.engine.scheduling.scheduling import Clock, drain, embedding, make, request, step

SIZE = 4
"""Tokens of a block."""
TEXT = list(range(10, 50))


def keeping(num_blocks: int = 64, most: int = 32, **changes: Any) -> Scheduler:
    """A scheduler in whose cache a tenant may lease `most` blocks."""
    clock = Clock()
    scheduler = make(num_blocks, clock=clock, leases=CacheLeases(most, clock), **changes)
    return scheduler


def ask(
    name: str, prompt: list[int], *places: int, ttl_s: float = 300.0, **asked: Any
) -> EngineRequest:
    """Return a request of one token's answer, with a breakpoint at each of `places`."""
    breakpoints = tuple(Breakpoint(place, ttl_s) for place in places)
    turn = {"breakpoints": breakpoints, "tenant": asked.pop("tenant", "")}
    return request(name, prompt, turn=turn, max_tokens=1, **asked)


def serve(scheduler: Scheduler, *asked: EngineRequest) -> dict[str, Usage]:
    """Final usages by id."""
    for each in asked:
        scheduler.add(each)
    return {output.request_id: output.usage for output in drain(scheduler)}


def flood(scheduler: Scheduler, num_tokens: int, name: str = "flood") -> None:
    serve(scheduler, request(name, num_tokens, max_tokens=1, salt=name))


def granted(name: str, index: int, num_tokens: int, ttl_s: float = 300.0) -> LeaseGranted:
    lease_id = f"{name}:{index}"
    return LeaseGranted(lease_id=lease_id, request_id=name, num_tokens=num_tokens, ttl_s=ttl_s)


def ended(name: str, num_tokens: int, kept_s: float, ttl_s: float = 300.0) -> LeaseEnded:
    return LeaseEnded(lease_id=f"{name}:0", num_tokens=num_tokens, ttl_s=ttl_s, kept_s=kept_s)


def test_each_breakpoint_writes_what_comes_after_the_one_before_in_whole_blocks() -> None:
    scheduler = keeping()
    usage = serve(scheduler, ask("r", TEXT, 9, 11, 30))["r"]
    assert (usage.cached_tokens, usage.kept_tokens) == (0, 0)
    assert usage.written_tokens == (8, 0, 20)
    assert scheduler.take_lease_events() == [granted("r", 0, 8), granted("r", 2, 20)]
    assert scheduler.take_lease_events() == []
    assert scheduler.cache.leases.num_blocks == 7


def test_what_is_kept_is_read_and_what_follows_is_written() -> None:
    scheduler = keeping()
    serve(scheduler, ask("first", TEXT, 20))
    usage = serve(scheduler, ask("next", [*TEXT, 1, 2], 30))["next"]
    assert usage.cached_tokens == 40, "all that was computed, kept or not"
    assert (usage.kept_tokens, usage.written_tokens) == (20, (8,))
    again = serve(scheduler, ask("again", TEXT, 10, 30))["again"]
    assert (again.kept_tokens, again.written_tokens) == (28, (0, 0))


def test_nothing_is_read_beyond_the_last_breakpoint_nor_without_one() -> None:
    scheduler = keeping()
    serve(scheduler, ask("first", TEXT, 20))
    found = serve(scheduler, ask("short", TEXT, 9), request("none", TEXT, max_tokens=1))
    assert found["short"].kept_tokens == 8 and found["short"].written_tokens == (0,)
    assert found["none"].kept_tokens == 0 and found["none"].written_tokens == ()
    assert found["none"].cached_tokens == 36


def test_what_no_lease_is_on_goes_first() -> None:
    scheduler = keeping(num_blocks=18)
    serve(scheduler, ask("kept", TEXT[:24], 16))
    scheduler.take_lease_events()
    for number in range(3):
        flood(scheduler, 52, f"flood-{number}")
    assert scheduler.take_lease_events() == []
    usage = serve(scheduler, ask("reader", TEXT[:24], 16))["reader"]
    assert (usage.cached_tokens, usage.kept_tokens) == (16, 16)


def test_then_leases_go_and_say_so_and_whoever_waits_is_served() -> None:
    scheduler = keeping(num_blocks=18)
    serve(scheduler, ask("kept", TEXT[:24], 16))
    scheduler.take_lease_events()
    scheduler._clock.now += 7  # type: ignore[attr-defined]
    flood(scheduler, 60)
    assert scheduler.take_lease_events() == [ended("kept", 16, 7.0)]
    assert ended("kept", 16, 7.0).is_broken
    assert scheduler.num_preemptions == 0
    assert scheduler.cache.leases.num_by_tenant == {}
    usage = serve(scheduler, ask("reader", TEXT[:24], 16))["reader"]
    assert usage.kept_tokens == 0 and usage.written_tokens == (16,)


def test_a_lease_ends_with_its_time_and_begins_anew_when_it_is_used() -> None:
    scheduler = keeping()

    def at(seconds: float) -> list[Any]:
        scheduler._clock.now = seconds  # type: ignore[attr-defined]
        scheduler.expire()
        return [*scheduler.take_lease_events()]

    serve(scheduler, ask("r", TEXT, 20))
    assert at(299) == [granted("r", 0, 20)]
    serve(scheduler, ask("unmarked", TEXT))
    serve(scheduler, ask("shorter", TEXT, 16))  # the lease reaches further: this is not its use
    assert at(299.5) == []
    serve(scheduler, ask("user", TEXT, 24))
    assert at(599) == [granted("user", 0, 4)]
    assert at(599.5) == [ended("r", 20, 599.5), ended("user", 4, 300.0)]
    assert scheduler.cache.leases.num_blocks == 0
    usage = serve(scheduler, ask("late", TEXT, 24))["late"]
    assert (usage.cached_tokens, usage.kept_tokens, usage.written_tokens) == (36, 0, (24,))


def test_a_tenant_has_its_bound_and_takes_nothing_from_another() -> None:
    scheduler = keeping(most=6)
    usages = serve(
        scheduler,
        ask("a1", TEXT, 16, 36, tenant="a"),
        ask("a2", [1] * 20, 8, tenant="a"),
        ask("b", [2] * 20, 16, tenant="b"),
    )
    assert {name: usage.written_tokens for name, usage in usages.items()} == {
        "a1": (16, 0),
        "a2": (8,),
        "b": (16,),
    }
    assert scheduler.cache.leases.num_by_tenant == {"a": 6, "b": 4}


def test_who_leaves_before_his_prompt_is_computed_gives_back_what_was_reserved() -> None:
    scheduler = keeping(most=10)
    scheduler.add(ask("r", TEXT, 12, 40))
    step(scheduler)  # 16 tokens of 40
    assert scheduler.take_lease_events() == [granted("r", 0, 12)]
    assert scheduler.cache.leases.num_by_tenant == {"": 10}
    scheduler.abort("r")
    scheduler.check_integrity()
    assert scheduler.cache.leases.num_by_tenant == {"": 3}


def test_what_was_promised_stands_through_a_preemption() -> None:
    scheduler = keeping(num_blocks=17, max_model_len=64)
    scheduler.add(request("old", TEXT[:24], max_tokens=40, salt="old"))
    step(scheduler)
    scheduler.add(ask("r", TEXT[:28], 24, n=1))
    outputs = []
    for _ in range(200):
        if not scheduler.has_unfinished():
            break
        outputs += step(scheduler)
    (usage,) = {output.usage for output in outputs if output.request_id == "r"}
    assert usage.written_tokens == (24,)
    events = scheduler.take_lease_events()
    assert events[0] == granted("r", 0, 24)


def test_choices_share_what_is_kept_for_their_request() -> None:
    scheduler = keeping()
    usage = serve(scheduler, ask("r", TEXT, 20, n=3))["r"]
    assert usage.written_tokens == (20,)
    assert scheduler.take_lease_events() == [granted("r", 0, 20)]


@pytest.mark.parametrize("changes", [{"enabled": False}, {"window": 8}])
def test_where_a_prompt_cannot_be_kept_nothing_is_written(changes: dict[str, Any]) -> None:
    scheduler = keeping(**changes)
    assert serve(scheduler, ask("r", TEXT, 20))["r"].written_tokens == (0,)
    assert scheduler.take_lease_events() == []


def test_the_vector_of_a_mean_reads_nothing_so_nothing_is_kept_for_it() -> None:
    scheduler = keeping(pooling="mean")
    turn = {"breakpoints": (Breakpoint(20, 300.0),)}
    scheduler.add(embedding("e", TEXT, turn=turn))
    assert drain(scheduler)[-1].usage.written_tokens == (0,)


@pytest.mark.parametrize(
    "breakpoints",
    [
        [(0, 300)],
        [(8, 300), (8, 300)],
        [(8, 300), (4, 300)],
        [(41, 300)],
        [(8, 0)],
        [(8, 3601)],
        [(number, 300) for number in (1, 2, 3, 4, 5)],
    ],
)
def test_what_is_no_place_to_keep_up_to_is_refused(breakpoints: list[tuple[int, float]]) -> None:
    turn = {"breakpoints": tuple(Breakpoint(*each) for each in breakpoints)}
    with pytest.raises(InvalidRequest) as refused:
        keeping().add(request("r", TEXT, turn=turn))
    assert refused.value.param == "breakpoints"


def test_leases_that_were_broken_off_do_not_pile_up() -> None:
    leases = CacheLeases(10, Clock())
    for number in range(1000):
        assert leases.reserve("t", 1)
        leases.grant(str(number), "t", [number], added=1, ttl_s=300)
        assert leases.break_off(number) == [number]
    assert len(leases._by_expiry) < 100
    leases.check_integrity([])


@dataclass
class Prefix:
    """The prefix of a request: what a lease is on, and what for."""

    salt: str
    tokens: list[int]
    events: list[Any] = field(default_factory=list)


class KeptPromises(RuleBasedStateMachine):
    """Random prompts over few blocks. Nobody is told that his lease has ended: then whoever asks
    with the same prompt reads all that it is on."""

    @initialize(spare=st.integers(0, 20), most=st.integers(0, 24), ahead=st.integers(1, 8))
    def start(self, spare: int, most: int, ahead: int) -> None:
        self.scheduler = keeping(16 + spare, most, max_num_seqs=ahead, max_num_batched_tokens=24)
        self.clock: Any = self.scheduler._clock
        self.asked: dict[str, EngineRequest] = {}
        self.usages: dict[str, Usage] = {}
        self.leases: dict[str, Prefix] = {}

    @rule(
        first=st.integers(0, 2),
        length=st.integers(1, 40),
        places=st.sets(st.integers(1, 40), min_size=1, max_size=4),
        salt=st.sampled_from(["a", "b"]),
        n=st.sampled_from([1, 1, 2]),
        answer=st.integers(1, 8),
        ttl_s=st.sampled_from([5.0, 60.0]),
    )
    def add(
        self,
        first: int,
        length: int,
        places: set[int],
        salt: str,
        n: int,
        answer: int,
        ttl_s: float,
    ) -> None:
        prompt = ([first] + TEXT)[:length]
        kept = tuple(Breakpoint(each, ttl_s) for each in sorted(places) if each <= len(prompt))
        name = f"r{len(self.asked)}"
        turn = {"breakpoints": kept, "tenant": salt}
        asked = request(name, prompt, salt=salt, n=n, max_tokens=answer, turn=turn)
        self.scheduler.add(asked)
        self.asked[name] = asked

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]), times=st.integers(1, 6))
    def steps(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.clock.now += seconds / times
            self.scheduler.expire()
            self.hear()
            due = self.live()
            states = self.scheduler._requests
            queued = [state for state in states.values() if state.first_scheduled_s is None]
            output = self.scheduler.schedule()
            broken = {lease.lease_id for lease in self.scheduler.cache.leases._ended}
            for state in queued:
                if state.first_scheduled_s is not None:
                    self.reads_what_is_kept(state.request_id, state.usage(), due, broken)
            self.take_in(output)

    def take_in(self, output: Any) -> None:
        sampled = {entry.key: [(1, None)] for entry in output.scheduled if entry.samples}
        for answer in self.scheduler.update(output, sampled):
            before = self.usages.get(answer.request_id, answer.usage)
            assert before.written_tokens == answer.usage.written_tokens
            assert before.kept_tokens == answer.usage.kept_tokens
            self.usages[answer.request_id] = answer.usage
        self.hear()

    def reads_what_is_kept(
        self, name: str, usage: Usage, due: list[Prefix], broken: set[str]
    ) -> None:
        asked = self.asked[name]
        if not asked.breakpoints:
            return
        last = asked.breakpoints[-1].num_tokens
        assert usage.kept_tokens <= min(usage.cached_tokens, last)
        most = min(last, len(asked.prompt_token_ids) - 1) // SIZE * SIZE
        sure = [
            min(len(prefix.tokens), most)
            for lease_id, prefix in self.leases.items()
            if prefix in due and lease_id not in broken and prefix.salt == asked.cache_salt
            if asked.prompt_token_ids[: len(prefix.tokens)] == prefix.tokens
        ]
        assert usage.kept_tokens >= max(sure, default=0), "what was paid for is not there"
        assert usage.kept_tokens + sum(usage.written_tokens) <= last

    def live(self) -> list[Prefix]:
        return [p for p in self.leases.values() if not isinstance(p.events[-1], LeaseEnded)]

    def hear(self) -> None:
        for event in self.scheduler.take_lease_events():
            if isinstance(event, LeaseGranted):
                asked = self.asked[event.request_id]
                place = asked.breakpoints[int(event.lease_id.rpartition(":")[2])].num_tokens
                assert event.lease_id not in self.leases
                tokens = asked.prompt_token_ids[: place // SIZE * SIZE]
                self.leases[event.lease_id] = Prefix(asked.cache_salt, tokens, [event])
                continue
            prefix = self.leases[event.lease_id]
            assert isinstance(prefix.events[-1], LeaseGranted), "it ended twice"
            prefix.events.append(event)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.scheduler._requests:
            self.scheduler.abort(data.draw(st.sampled_from(sorted(self.scheduler._requests))))

    @invariant()
    def one_story(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.has_unfinished():
            self.steps(0.5, 1)
        for name, usage in self.usages.items():
            for index, written in enumerate(usage.written_tokens):
                lease = self.leases.get(f"{name}:{index}")
                assert (lease is not None) == (written > 0), "written and not kept"
                assert lease is None or lease.events[0].num_tokens == written
        self.clock.now += 10_000
        self.scheduler.expire()
        self.hear()
        assert not self.live() and self.scheduler.cache.leases.num_by_tenant == {}


TestKeptPromises = KeptPromises.TestCase
TestKeptPromises.settings = settings(
    max_examples=examples(60), stateful_step_count=25, deadline=None
)
