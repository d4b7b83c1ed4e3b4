"""A generation whose engine is lost amid it goes on elsewhere: the reader gets what it would have
got, and each token is on one bill, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from billing.events import Attempt, Band, Price, Quantities, UsageEvent, failover_waste_id
from billing.pricing.price_book import PriceBook
from billing.pricing.rating import prices_at, rate
from billing.spool.spool import Spool
from engine.errors import EngineStepFailed, EngineUnavailable
from engine.fake.engine import FAKE_CONFIG, FakeCore, FakeEngine, drawn
from engine.protocol import EngineOutput, EngineRequest, Usage
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.transport.output_streams import Acceptance, Take
from foundation.tasks import TaskSet
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.errors import ReplicaLost, ReplicaStepFailed
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Fleet, Route
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import MeteredUsage
from gateway.inference import attempt as attempt_module
from gateway.inference.attempt import RESUMED
from gateway.inference.metering import to_quantities_since
from gateway.inference.services import GenerationServices
from gateway.inference.settlement import CrashSettlement
from gateway.limits.allowance import PauseReasons
from gateway.limits.outcomes import Units
from gateway.wire.openai.completions import from_completions
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.surfaces import CHAT
from tests.billing.spool.test_spool import full_disk
from tests.gateway.office import AsListed, Office, ScriptedReplica, WatchedLimiter, read
from tests.gateway.registry.made import versions_of

LENGTH = 12


class MortalEngine(FakeEngine):
    """Its process dies after so many outputs of each request, one number a request; 0: before the
    first. It is back at once, or once `restore` is called."""

    def __init__(self, core: FakeCore, *deaths: int, comes_back: bool = False) -> None:
        super().__init__(core)
        self.deaths, self.comes_back = list(deaths), comes_back
        self.asked: list[EngineRequest] = []

    async def generate(
        self, request: EngineRequest, take: Take | None = None, *, at_once: bool = False
    ) -> AsyncGenerator[EngineOutput, None]:
        self.asked.append(request)
        left = self.deaths.pop(0) if self.deaths else -1

        def count(output: EngineOutput) -> Acceptance:
            nonlocal left
            found = "left" if left == 0 or take is None else take(output)
            left -= found != "left"
            return found

        async with aclosing(super().generate(request, count)) as outputs:
            async for output in outputs:
                if left == 0:
                    self.connected = self.comes_back
                    raise EngineUnavailable("killed")
                left -= 1
                yield output

    async def wait_connected(self, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            while not self.connected:
                await asyncio.sleep(0.002)
        return self.status


def core_of(tokenizer: Tokenizer) -> FakeCore:
    size = tokenizer.vocab_size
    return FakeCore(FAKE_CONFIG, vocab_size=size, respond=partial(drawn, vocab_size=size))


MakeEngine = Callable[..., MortalEngine]


@pytest.fixture
def engine(tokenizer: Tokenizer) -> MakeEngine:
    def make(*deaths: int, **options: Any) -> MortalEngine:
        return MortalEngine(core_of(tokenizer), *deaths, **options)

    return make


@pytest.fixture
async def open_office(
    spool: Spool,
    redis: Redis,
    tasks: TaskSet,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    threads: PrepareThreads,
) -> AsyncIterator[Callable[..., Office]]:
    limiter = WatchedLimiter(redis)

    def make(*engines: FakeEngine, **options: Any) -> Office:
        replicas = tuple(
            EngineReplica(
                name=f"m/{number}",
                client=each,
                tokenizer=tokenizer,
                template=template,
                threads=threads,
            )
            for number, each in enumerate(engines)
        )
        services = GenerationServices(
            fleet=Fleet([Route(model="m", kind="engine", replicas=replicas)], rng=AsListed()),
            limiter=limiter,
            spool=spool,
            price_book=PriceBook.load(),
            tasks=tasks,
            cache_salts=lambda org: f"salt of {org}",
            stalled_reader_s=60.0,
            **options,
        )
        return Office(services, redis)

    yield make
    await limiter.close()


def chat(**fields: Any) -> GenerateRequest:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": LENGTH,
        "stream": True,
        "seed": 3,
    }
    return from_openai(json.dumps(body | fields).encode(), "engine")


async def say(office: Office, request: GenerateRequest, surface: bool = False) -> bytes:
    """Return the whole answer. `surface`: as chats are written."""
    header = AnswerHeader(id="chatcmpl-1", created=1, service_tier="default")
    encoder = CHAT.encoder(request, header) if surface else None
    return await read(office.begin(request=request, encoder=encoder))


def of_kind(events: Sequence[UsageEvent], kind: str) -> list[UsageEvent]:
    return [event for event in events if event.kind == kind]


def merged(stream: bytes) -> tuple[dict[int, dict[str, Any]], dict[str, int]]:
    """The choices of a stream of chats, and its usage; how the text is cut is no matter."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] = {}
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for each in chunk["choices"]:
            found = choices.setdefault(each["index"], {"text": "", "logprobs": [], "end": None})
            found["text"] += each["delta"].get("content") or ""
            if each.get("logprobs"):
                found["logprobs"] += each["logprobs"]["content"]
            found["end"] = each["finish_reason"] or found["end"]
    return choices, usage


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "two choices": {"n": 2},
    "stop string": {"stop": "STOP"},
}


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
async def test_whatever_the_cut_the_reader_gets_the_same(
    fields: dict[str, Any], open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    """One output after the other is the last of its engine."""
    fields = dict(fields)
    if "stop" in fields:  # in the middle, and over the border of two tokens
        plain = await say(open_office(engine()), chat(), surface=True)
        text = merged(plain)[0][0]["text"]
        fields["stop"] = text[len(text) // 2 - 1 : len(text) // 2 + 2]
    whole = await say(open_office(engine()), chat(**fields), surface=True)
    for cut in range(1, LENGTH):
        first, second = engine(cut), engine()
        office = open_office(first, second)
        found = await say(office, chat(**fields), surface=True)
        await office.settled()
        choices, usage = merged(found)
        assert (choices, usage) == merged(whole)
        assert found.count(RESUMED) == len(second.asked) <= 1
        assert b"error" not in found


async def test_each_token_is_on_one_bill(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    """Each attempt bills what it delivered; the prompt is the first one's."""
    first, second, third = engine(4), engine(3), engine()
    office = open_office(first, second, third)
    whole = await say(open_office(engine()), chat())
    office.services.limiter.settled.clear()  # type: ignore[attr-defined]
    assert (await say(office, chat())).replace(RESUMED, b"") == whole
    await office.settled()
    (_, *events) = await office.billed()
    bills, waste = of_kind(events, "usage"), of_kind(events, "waste")
    assert [each.quantities.output for each in bills] == [4, 3, 5]
    prompt = bills[0].quantities.input_total
    assert prompt > 0 and [each.quantities.input_total for each in bills[1:]] == [0, 0]
    assert [each.finish for each in bills] == ["failover", "failover", "done"]
    assert [each.id for each in waste] == [failover_waste_id(each.id) for each in bills[1:]]
    assert [each.quantities.input_total for each in waste] == [prompt + 4, prompt + 7]
    assert [each.quantities.output_total for each in waste] == [0, 0]
    assert {each.finish for each in waste} == {"failover"}
    assert len({each.attempt.request_id for each in events}) == 1
    assert [request.said for request in second.asked] == [(first_said(first, 4),)]
    assert second.asked[0].request_id == bills[1].id != first.asked[0].request_id == bills[0].id
    assert third.acknowledged == [bills[2].id] and first.acknowledged == []
    assert office.services.limiter.settled == [prompt + LENGTH]  # type: ignore[attr-defined]
    value, labels = office.telemetry.registry.get_sample_value, {"model": "m"}
    assert value("tollgate_resumes_total", labels | {"outcome": "resumed"}) == 2
    assert value("tollgate_resume_gap_seconds_count", labels) == 2


def first_said(engine: MortalEngine, length: int) -> list[int]:
    (request, *_) = engine.asked
    answer = engine.core._respond(request, 0)
    return [next(answer) for _ in range(length)]


async def test_a_crash_settles_what_all_attempts_of_a_request_used(
    open_office: Callable[..., Office], engine: MakeEngine, tasks: TaskSet
) -> None:
    """They share one lease, which the first event that is settled would end."""
    office = open_office(engine(4), engine())
    await say(office, chat())
    await office.settled()
    events, told = await office.billed(), list[tuple[str, Units]]()

    class Heard:
        async def settle_lease(self, org: str, lease_id: str, used: Units) -> None:
            told.append((lease_id, used))

    settlement: Any = CrashSettlement(
        db=None,  # type: ignore[arg-type]
        limiter=Heard(),  # type: ignore[arg-type]
        tasks=tasks,
        price_book=office.services.price_book,
        telemetry=office.telemetry,
    )
    await settlement._settle_leases(events)
    ((lease_id, used),) = told
    assert lease_id == events[0].attempt.request_id
    assert used.output_tokens == LENGTH
    assert used.input_tokens == events[0].quantities.input_total


async def test_an_unseeded_request_goes_on_with_the_seed_it_was_given(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    first, second = engine(4), engine()
    office = open_office(first, second)
    await say(office, chat(seed=None))
    (begun,), (gone_on,) = first.asked, second.asked
    assert begun.sampling.seed is gone_on.sampling.seed is None
    assert begun.drawn_seed is not None and gone_on.drawn_seed == begun.drawn_seed
    other = engine()
    await say(open_office(other), chat(seed=None))
    assert other.asked[0].drawn_seed != begun.drawn_seed


async def test_a_whole_answer_is_billed_when_somebody_has_it(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    whole = await say(open_office(engine()), chat(stream=False), surface=True)
    office = open_office(engine(5), engine())
    found = await say(office, chat(stream=False), surface=True)
    await office.settled()
    assert json.loads(found)["choices"] == json.loads(whole)["choices"]
    assert json.loads(found)["usage"] == json.loads(whole)["usage"]
    (_, *events) = await office.billed()
    assert [each.quantities.output for each in of_kind(events, "usage")] == [5, LENGTH - 5]


async def test_a_whole_answer_that_nobody_finishes_is_the_houses(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    office = open_office(engine(5), engine(2), max_resumes=1)
    delivery = office.begin(request=chat(stream=False))
    with pytest.raises(ReplicaLost):
        await read(delivery)
    await office.settled()
    events = await office.billed()
    assert {each.kind for each in events} == {"waste"} and not delivery.is_billed
    assert sum(each.quantities.output for each in events) == 7
    assert office.services.limiter.settled == [None]  # type: ignore[attr-defined]


async def test_a_generation_that_is_lost_too_often_ends_with_what_it_delivered(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    mortal = engine(3, 2, 2, 1, comes_back=True)
    office = open_office(mortal)
    delivery, found = office.begin(request=chat()), b""
    with pytest.raises(ReplicaLost, match="killed"):
        while (chunk := await delivery.next()) is not None:
            found += chunk
    await office.settled()
    events = await office.billed()
    assert [each.quantities.output for each in of_kind(events, "usage")] == [3, 2, 2, 1]
    assert RESUMED in found and len(mortal.asked) == 4
    whole = await say(open_office(engine()), chat())
    assert whole.startswith(found.replace(RESUMED, b""))
    labels = {"model": "m", "outcome": "exhausted"}
    assert office.telemetry.registry.get_sample_value("tollgate_resumes_total", labels) == 1


async def test_nothing_is_resumed_where_the_settings_say_so(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    second = engine()
    office = open_office(engine(3), second, max_resumes=0)
    with pytest.raises(ReplicaLost):
        await read(office.begin(request=chat()))
    await office.settled()
    (event,) = await office.billed()
    assert (event.quantities.output, event.finish) == (3, "error")
    assert second.asked == []


async def test_the_only_engine_is_waited_for(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    mortal = engine(3)
    office = open_office(mortal)
    whole = await say(open_office(engine()), chat())
    reading = asyncio.create_task(say(office, chat()))
    async with asyncio.timeout(30):
        while mortal.connected:
            await asyncio.sleep(0.002)
    assert len(mortal.asked) == 1
    mortal.restore()
    assert (await reading).replace(RESUMED, b"") == whole
    assert len(mortal.asked) == 2


async def test_who_leaves_while_nobody_is_there_pays_for_what_was_delivered(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    mortal = engine(3)
    office = open_office(mortal)
    delivery = office.begin(request=chat())
    reading = asyncio.create_task(read(delivery))
    async with asyncio.timeout(30):
        while mortal.connected:
            await asyncio.sleep(0.002)
    delivery.abandon()
    await reading
    await office.settled()
    (event,) = await office.billed()
    assert (event.quantities.output, event.kind) == (3, "usage")
    labels = {"model": "m", "outcome": "left"}
    assert office.telemetry.registry.get_sample_value("tollgate_resumes_total", labels) == 1


async def test_at_the_clients_deadline_nobody_is_waited_for_any_more(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    office = open_office(engine(3))
    delivery = office.begin(request=chat(), timeout_s=0.2)
    with pytest.raises(Exception, match="not done in 0.200 s"):
        await read(delivery)
    await office.settled()
    (event,) = await office.billed()
    assert (event.quantities.output, event.kind) == (3, "usage")


class SilentEngine(MortalEngine):
    """It stops amid a request and says nothing more, as one that hangs."""

    async def generate(
        self, request: EngineRequest, take: Take | None = None, *, at_once: bool = False
    ) -> AsyncGenerator[EngineOutput, None]:
        async with aclosing(super().generate(request)) as outputs:
            yield await anext(outputs)
            self.is_silent = True
            self.core.abort(request.request_id)
            self._streams[request.request_id]._pending.clear()
            yield await anext(outputs)


async def test_a_silent_engine_is_left_for_another_one(
    open_office: Callable[..., Office],
    engine: MakeEngine,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt_module, "LOOK_S", 0.01)
    whole = await say(open_office(engine()), chat())
    silent = SilentEngine(core_of(tokenizer))
    second = engine()
    office = open_office(silent, second)
    assert (await say(office, chat())).replace(RESUMED, b"") == whole
    await office.settled()
    assert len(second.asked) == 1 and silent.connected


async def test_the_only_engine_is_not_left_for_its_silence(
    open_office: Callable[..., Office], engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "LOOK_S", 0.0)
    slow = engine()
    slow.is_silent = True
    whole = await say(open_office(engine()), chat())
    assert await say(open_office(slow), chat()) == whole
    assert len(slow.asked) == 1


async def test_pauses_move_with_a_generation() -> None:
    told: list[tuple[str, bool]] = []

    def of(name: str) -> Callable[[bool], Awaitable[None]]:
        async def set_paused(paused: bool) -> None:
            told.append((name, paused))

        return set_paused

    pauses = PauseReasons(of("a"))
    await pauses.for_limits(True)
    assert pauses.move_to(of("b"))
    await pauses.for_limits(False)
    assert not pauses.move_to(of("c"))
    assert told == [("a", True), ("b", False)]


def test_a_part_is_rated_by_the_size_of_the_whole() -> None:
    bands = (Band(1000, "large", 9),)
    prices = {"uncached_input": Price("in", 1, bands), "output": Price("out", 2, bands)}
    whole = rate(Quantities(uncached_input=1500, output=10), prices)  # type: ignore[arg-type]
    pinned = prices_at(prices, 1500)  # type: ignore[arg-type]
    first = rate(Quantities(uncached_input=1500, output=4), prices)  # type: ignore[arg-type]
    rest = rate(Quantities(output=6), pinned)
    assert first.amount_pico + rest.amount_pico == whole.amount_pico
    assert rest.lines[0].price_id == "large"


def test_what_turns_out_to_be_reasoning_is_booked_once() -> None:
    attempt = Attempt(
        id="a", request_id="r", org="o", project="p", key="k", model="m", prices={}, admitted_at=0
    )
    before = MeteredUsage(uncached_input=7, output=3)
    usage = MeteredUsage(uncached_input=7, output=9, reasoning_output=8)
    assert to_quantities_since(usage, before, attempt) == Quantities(reasoning_output=6)
    later = msgspec.structs.replace(usage, output=20)
    assert to_quantities_since(later, usage, attempt) == Quantities(output=11)


class FailingEngine(MortalEngine):
    """A step of it fails behind so many outputs of each request, and with it the request."""

    async def generate(
        self, request: EngineRequest, take: Take | None = None, *, at_once: bool = False
    ) -> AsyncGenerator[EngineOutput, None]:
        try:
            async with aclosing(super().generate(request, take)) as outputs:
                async for output in outputs:
                    yield output
        except EngineUnavailable:
            yield EngineOutput(
                request_id=request.request_id,
                usage=Usage(prompt_tokens=1),
                finish_reason="error",
                error_code=EngineStepFailed.code,
                finished=True,
            )


@pytest.mark.parametrize("num_outputs", [0, 3])
async def test_a_request_whose_steps_fail_is_tried_once_more_and_no_oftener(
    num_outputs: int, open_office: Callable[..., Office], tokenizer: Tokenizer
) -> None:
    """It may be the cause, and each try may take others along."""
    engines = [
        FailingEngine(core_of(tokenizer), *[num_outputs] * 3, comes_back=True) for _ in range(3)
    ]
    office = open_office(*engines)
    with pytest.raises((ReplicaLost, ReplicaStepFailed), match="step failed"):
        await read(office.begin(request=chat()))
    await office.settled()
    assert [len(each.asked) for each in engines] == [1, 1, 0]


async def test_who_was_beside_a_failed_step_goes_on_elsewhere(
    open_office: Callable[..., Office], engine: MakeEngine, tokenizer: Tokenizer
) -> None:
    whole = await say(open_office(engine()), chat())
    first = FailingEngine(core_of(tokenizer), 3, comes_back=True)
    second, third = engine(2), engine()
    found = await say(open_office(first, second, third), chat())
    assert found.replace(RESUMED, b"") == whole
    assert len(second.asked) == len(third.asked) == 1


def core_of_another(tokenizer: Tokenizer) -> FakeCore:
    size = tokenizer.vocab_size
    config = msgspec.structs.replace(FAKE_CONFIG, model=Path("another"))
    return FakeCore(config, vocab_size=size)


async def test_nobody_goes_on_with_another_model(
    open_office: Callable[..., Office], engine: MakeEngine, tokenizer: Tokenizer
) -> None:
    """A reload put another path behind the model's name: who began with the old one goes on with
    the old one, or ends."""
    whole = await say(open_office(engine()), chat())
    other, same = MortalEngine(core_of_another(tokenizer)), engine()
    found = await say(open_office(engine(4), other, same), chat())
    assert found.replace(RESUMED, b"") == whole
    assert (len(other.asked), len(same.asked)) == (0, 1)
    office = open_office(first := engine(4), other)
    first.core = core_of_another(tokenizer)
    first.core, restarted = core_of(tokenizer), first.core
    delivery, said = office.begin(request=chat()), b""
    with pytest.raises(ReplicaLost, match="killed"):
        while (chunk := await delivery.next()) is not None:
            said += chunk
            if not first.connected:
                first.core = restarted
                first.restore()
    await office.settled()
    assert whole.startswith(said) and RESUMED not in said
    assert len(first.asked) == 1 and other.asked == []


async def test_nobody_goes_on_where_an_upstream_has_the_name_now(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    office, first = open_office(first := engine(4)), first
    upstream = ScriptedReplica()
    route = Route(model="m", kind="upstream", replicas=(upstream,))
    delivery = office.begin(request=chat())
    assert await delivery.next()
    office.services.fleet.replace([route])
    with pytest.raises(ReplicaLost, match="killed"):
        await read(delivery)
    assert upstream.attempts == []


async def test_what_was_left_and_finds_no_room_on_disk_is_the_houses(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    """A whole answer of which nobody got a byte, whose client left while nobody was there."""
    mortal = engine(3)
    office = open_office(mortal)
    delivery = office.begin(request=chat(stream=False))
    reading = asyncio.create_task(read(delivery))
    async with asyncio.timeout(30):
        while mortal.connected:
            await asyncio.sleep(0.002)
    (segment,) = office.services.spool.directory.glob("*.log")
    with full_disk(segment.stat().st_size):
        delivery.abandon()
        await asyncio.gather(reading, return_exceptions=True)
        await office.settled()
    assert office.services.limiter.settled == [None]  # type: ignore[attr-defined]
    async with asyncio.timeout(30):
        while not (billed := await office.billed()):
            await asyncio.sleep(0.01)
    (event,) = billed
    assert (event.kind, event.quantities.output) == ("waste", 3)


PROMPTS = ["One, two and three.", "Four"]


def completion(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "prompt": PROMPTS, "max_tokens": 4, "stream": True, "seed": 3}
    return from_completions(json.dumps(body | fields).encode(), "engine")


@pytest.mark.parametrize("deaths", [(1,), (2,), (3,), (1, 1), (1, 2, 1)])
async def test_each_prompt_is_billed_once_wherever_it_was_first_computed(
    deaths: tuple[int, ...], open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    """The first output is of the first prompt, the second of the second one."""
    engines = [engine(each) for each in deaths]
    office = open_office(*engines, engine())
    await say(office, completion())
    await office.settled()
    events = await office.billed()
    lengths = [len(each) for each in engines[0].asked[0].prompts]
    bills, waste = of_kind(events, "usage"), of_kind(events, "waste")
    first = lengths[:1] if deaths[0] == 1 else lengths
    assert bills[0].quantities.input_total == sum(first)
    assert sum(each.quantities.input_total for each in bills) == sum(lengths)
    assert sum(each.quantities.output for each in bills) == 4 * len(PROMPTS)
    again = [each.quantities.input_total for each in waste if each.finish == "failover"]
    if deaths == (1,):
        assert again == [lengths[0] + 1]
    assert office.services.limiter.settled == [  # type: ignore[attr-defined]
        sum(lengths) + 4 * len(PROMPTS)
    ]


async def test_who_leaves_in_the_queue_of_a_third_engine_adds_no_waste(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    """Nothing of it ran there, whatever was computed again before."""
    third, is_asked = engine(), asyncio.Event()

    async def never(_: float) -> None:
        is_asked.set()
        await asyncio.Event().wait()

    third._sleep = never
    office = open_office(engine(4), engine(3), third)
    delivery = office.begin(request=chat())
    reading = asyncio.create_task(read(delivery))
    await is_asked.wait()
    delivery.abandon()
    await reading
    await office.settled()
    events = await office.billed()
    bills, waste = of_kind(events, "usage"), of_kind(events, "waste")
    assert [each.quantities.output for each in bills] == [4, 3]
    prompt = bills[0].quantities.input_total
    assert [each.quantities.input_total for each in waste] == [prompt + 4]
    await third.close()


async def test_a_generation_ends_on_the_version_that_began_it(
    open_office: Callable[..., Office], engine: MakeEngine
) -> None:
    """Its caller is pinned to another one while its engine is away."""
    dying, other = engine(3), engine()
    office = open_office(dying, other)
    fleet = office.services.fleet
    (both,) = fleet.routes
    own = msgspec.structs.replace(both, replicas=both.replicas[:1])
    fleet.replace([own, msgspec.structs.replace(both, model="next", replicas=both.replicas[1:])])
    delivery = office.begin(request=chat())
    async with asyncio.timeout(30):
        while dying.connected:
            await asyncio.sleep(0.002)
    fleet.versions = versions_of("m", "next", pinned_to="next")
    dying.connected = True
    await read(delivery)
    assert len(dying.asked) == 2 and not other.asked
    await read(office.begin(request=chat()))
    assert len(other.asked) == 1
