"""EngineReplica on the fake engine: text, stops, exact usage, refusals and losses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine.errors import EngineUnavailable, InvalidRequest
from engine.fake.engine import FAKE_CONFIG, FakeCore, FakeEngine, Respond, drawn
from engine.protocol import (
    EngineOutput,
    EngineRequest,
    LaneStatus,
    SamplingParams,
    StepCosts,
    Usage,
)
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.transport.output_streams import Take
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.engine_view import EngineView
from gateway.fleet.errors import ReplicaDied, ReplicaLost, ReplicaOverloaded, ReplicaUnavailable
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.sent_work import SentWork
from gateway.generate_request import GenerateRequest, ToTokenize
from gateway.generation_events import MeteredUsage, ReplicaEvent, TextDelta
from gateway.lanes import Priority
from gateway.request_errors import BadField, ContextTooLong
from gateway.wire.openai.completions import from_completions
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.openai.tokenizing import from_detokenize, from_tokenize

PROMPT = "<user>hello</s><assistant>"
PROMPT_TOKENS = 8
Make = Callable[..., EngineReplica]


def chat(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    return from_openai(json.dumps(body).encode(), "engine")


@pytest.fixture
def make(tokenizer: Tokenizer, template: ChatTemplate, threads: PrepareThreads) -> Make:
    def make_replica(engine: Any, adapter: str = "") -> EngineReplica:
        return EngineReplica(
            name="m@0",
            client=engine,
            tokenizer=tokenizer,
            template=template,
            threads=threads,
            adapter=adapter,
        )

    return make_replica


LARGE = "0123456789 hello" * (2**20 // 16)
USER = {"role": "user", "content": "hello"}
HOPELESS: dict[str, tuple[Callable[[EngineReplica], Awaitable[Any]], str]] = {
    "a text": (
        lambda replica: replica.tokenize(tokenizing(prompt=LARGE), Priority(tenant="o")),
        "prompt",
    ),
    "a conversation": (
        lambda replica: replica.tokenize(
            tokenizing(messages=[{**USER, "content": LARGE}]), Priority(tenant="o")
        ),
        "messages",
    ),
    "counted": (
        lambda replica: replica.count(chat(messages=[{**USER, "content": LARGE}])),
        "messages",
    ),
    "completed": (
        lambda replica: replica.prepare(
            from_completions(json.dumps({"model": "m", "prompt": LARGE}).encode(), "engine")
        ),
        "prompt",
    ),
    "ids": (
        lambda replica: replica.detokenize(
            from_detokenize(json.dumps({"model": "m", "tokens": [1] * 100_001}).encode()),
            Priority(tenant="o"),
        ),
        "tokens",
    ),
}


def tokenizing(**fields: Any) -> ToTokenize:
    return from_tokenize(json.dumps({"model": "m", **fields}).encode())


@pytest.mark.parametrize(("ask", "param"), HOPELESS.values(), ids=HOPELESS)
async def test_megabytes_that_no_context_holds_are_not_tokenized(
    make: Make,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[EngineReplica], Awaitable[Any]],
    param: str,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it was tokenized")

    replica = make(FakeEngine(FakeCore(FAKE_CONFIG, vocab_size=tokenizer.vocab_size)))
    monkeypatch.setattr(Tokenizer, "_encoding", refuse)
    monkeypatch.setattr(Tokenizer, "decode", refuse)
    with pytest.raises(ContextTooLong, match="maximum context length is [0-9]+ tokens") as caught:
        await ask(replica)
    assert caught.value.param == param


Says = Callable[..., FakeEngine]


@pytest.fixture
def says(tokenizer: Tokenizer) -> Says:
    """An engine that answers choice i with the i-th text, then ends."""

    def build(*texts: str, **options: Any) -> FakeEngine:
        def respond(request: EngineRequest, index: int) -> Iterator[int]:
            return iter(tokenizer.encode(texts[index]))

        return fake(tokenizer, respond, **options)

    return build


def fake(tokenizer: Tokenizer, respond: Respond, **options: Any) -> FakeEngine:
    config = replace(FAKE_CONFIG, **options) if options else FAKE_CONFIG
    return FakeEngine(FakeCore(config, vocab_size=tokenizer.vocab_size, respond=respond))


class EveryOther:
    """Takes every other event that it is offered."""

    def __init__(self, events: list[ReplicaEvent]) -> None:
        self.events, self.was_ready = events, False

    @property
    def is_ready(self) -> bool:
        self.was_ready = not self.was_ready
        return self.was_ready

    def take(self, event: ReplicaEvent) -> None:
        assert not event.finished
        self.events.append(event)


async def run(
    replica: EngineReplica, request: GenerateRequest, events: list[ReplicaEvent] | None = None
) -> list[ReplicaEvent]:
    events = [] if events is None else events
    prepared = await replica.prepare(request)
    stream = replica.stream(prepared, attempt_id="a", cache_salt="org", taker=EveryOther(events))
    async with aclosing(stream):
        async for event in stream:
            events.append(event)
    return events


def deltas(events: list[ReplicaEvent], index: int = 0) -> list[TextDelta]:
    found: list[TextDelta] = []
    for item in (item for event in events for item in event.items):
        assert isinstance(item, TextDelta)
        if item.index == index:
            found.append(item)
    return found


def text(events: list[ReplicaEvent], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas(events, index))


def reasons(events: list[ReplicaEvent], index: int = 0) -> list[str]:
    return [d.finish_reason for d in deltas(events, index) if d.finish_reason is not None]


def last_usage(events: list[ReplicaEvent]) -> MeteredUsage:
    assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
    usage = events[-1].usage
    assert usage is not None and not usage.estimated
    return usage


async def test_an_answer_and_its_usage(make: Make, says: Says) -> None:
    events = await run(make(says("Grüße 😀!")), chat())
    assert text(events) == "Grüße 😀!"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(d.text for d in deltas(events))
    assert reasons(events) == ["stop"]
    num_tokens = len("Grüße 😀!".encode()) + 1  # and the EOS
    assert last_usage(events) == MeteredUsage(uncached_input=PROMPT_TOKENS, output=num_tokens)
    outputs = [event.usage.output for event in events if event.usage is not None]
    assert outputs == sorted(outputs)


async def test_a_second_time_the_prompt_is_cached(make: Make, says: Says) -> None:
    replica = make(says("ok"))
    request = chat(messages=[{"role": "user", "content": "x" * 40}])
    assert last_usage(await run(replica, request)).cache_read == 0
    usage = last_usage(await run(replica, request))
    assert (usage.cache_read, usage.prompt_tokens) == (32, 43)


async def test_the_length_is_a_limit(make: Make, says: Says) -> None:
    events = await run(make(says("abcdef")), chat(max_tokens=3))
    assert (text(events), reasons(events)) == ("abc", ["length"])
    assert last_usage(events).output == 3


@pytest.mark.parametrize(("keep", "shown"), [(False, "one "), (True, "one STOP")])
async def test_a_stop_string_ends_the_answer_and_the_work(
    make: Make, says: Says, keep: bool, shown: str
) -> None:
    engine = says("one STOP two three four five six seven")
    events = await run(make(engine), chat(stop=["STOP"], include_stop_str_in_output=keep))
    assert (text(events), reasons(events)) == (shown, ["stop"])
    usage = last_usage(events)
    assert usage.output == len("one STOP")
    assert usage.output + usage.wasted_output == engine.status.generated_tokens
    assert not engine.core.has_work()


async def test_a_stop_string_that_never_comes_holds_nothing_back_for_good(
    make: Make, says: Says
) -> None:
    events = await run(make(says("one ST")), chat(stop="STOP"))
    assert (text(events), reasons(events)) == ("one ST", ["stop"])
    assert last_usage(events).output == len("one ST") + 1


async def test_choices_stop_one_by_one(make: Make, says: Says) -> None:
    engine = says("a STOP aaaaaaaaaaaa", "bbbbbbbbb STOP bb", "c")
    events = await run(make(engine), chat(stop="STOP", n=3))
    assert [text(events, i) for i in range(3)] == ["a ", "bbbbbbbbb ", "c"]
    assert [reasons(events, i) for i in range(3)] == [["stop"]] * 3
    usage = last_usage(events)
    assert usage.output == len("a STOP") + len("bbbbbbbbb STOP") + len("c") + 1
    assert usage.output + usage.wasted_output == engine.status.generated_tokens
    assert usage.wasted_output >= len("bbbbbbbbb STOP") - len("a STOP")


async def test_a_stop_id_is_not_shown(make: Make, says: Says, tokenizer: Tokenizer) -> None:
    [stop_id] = tokenizer.encode("!")
    for keep, shown in ((False, "hey"), (True, "hey!")):
        request = chat(stop_token_ids=[stop_id], include_stop_str_in_output=keep)
        events = await run(make(says("hey!more")), request)
        assert (text(events), reasons(events)) == (shown, ["stop"])
        assert last_usage(events).output == 4


async def test_logprobs_show_the_bytes_of_a_token(make: Make, says: Says) -> None:
    events = await run(make(says("ü")), chat(logprobs=True, top_logprobs=2))
    infos = [info for delta in deltas(events) for info in delta.logprobs or []]
    assert [info.bytes for info in infos] == [[0xC3], [0xBC]]
    assert all(len(info.top_logprobs) == 2 for info in infos)
    assert infos[0].top_logprobs[0].bytes == [0xC3]


async def test_an_abort_ends_with_the_exact_usage(make: Make, tokenizer: Tokenizer) -> None:
    engine = fake(tokenizer, lambda request, index: iter([5] * 10_000))
    replica = make(engine)
    prepared = await replica.prepare(chat(n=2))
    events: list[ReplicaEvent] = []
    async with aclosing(replica.stream(prepared, attempt_id="a", cache_salt="")) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == 7:
                await replica.abort("a")
    assert last_usage(events).output == engine.status.generated_tokens
    assert not engine.core.has_work()


async def test_an_abort_before_the_engine_began_costs_nothing(
    make: Make, tokenizer: Tokenizer
) -> None:
    replica = make(fake(tokenizer, drawn))
    prepared = await replica.prepare(chat())
    stream = replica.stream(prepared, attempt_id="a", cache_salt="")
    running = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    await replica.abort("a")
    event = await running
    assert (event.usage, event.finished) == (None, True)
    await stream.aclose()


async def test_closing_the_stream_aborts(make: Make, tokenizer: Tokenizer) -> None:
    engine = fake(tokenizer, lambda request, index: iter([5] * 10_000))
    replica = make(engine)
    stream = replica.stream(await replica.prepare(chat()), attempt_id="a", cache_salt="")
    await anext(stream)
    await stream.aclose()
    assert not engine.core.has_work()


async def test_an_engine_that_is_away(make: Make, says: Says) -> None:
    engine = says("x")
    replica = make(engine)
    prepared = await replica.prepare(chat())
    engine.lose()
    assert not replica.health().available
    with pytest.raises(ReplicaUnavailable) as raised:
        await anext(replica.stream(prepared, attempt_id="a", cache_salt=""))
    assert not isinstance(raised.value, ReplicaDied), "it never had it: nobody waits for it"
    engine.restore()
    assert replica.health().available
    assert text(await run(replica, chat())) == "x"


async def test_an_engine_that_dies_with_a_request_can_be_asked_again(
    make: Make, tokenizer: Tokenizer
) -> None:
    held = asyncio.Event()

    async def until_told(_: float) -> None:
        await held.wait()

    core = FakeCore(vocab_size=tokenizer.vocab_size, respond=lambda request, index: iter([5]))
    engine = FakeEngine(core, delay_s=1.0, sleep=until_told)
    replica = make(engine)
    prepared = await replica.prepare(chat())
    stream = replica.stream(prepared, attempt_id="a", cache_salt="")
    asked = asyncio.ensure_future(anext(stream))
    while not core.has_work():
        await asyncio.sleep(0)
    engine.lose()
    with pytest.raises(ReplicaDied):
        await asked
    held.set()
    assert not await replica.wait_until_back(0.01)
    engine.restore()
    assert await replica.wait_until_back(0.01)


async def test_an_engine_lost_in_mid_stream(make: Make, tokenizer: Tokenizer) -> None:
    engine = fake(tokenizer, lambda request, index: iter([5] * 10_000))
    replica = make(engine)
    stream = replica.stream(await replica.prepare(chat()), attempt_id="a", cache_salt="")
    event = await anext(stream)
    engine.lose()
    with pytest.raises(ReplicaLost):
        async for event in stream:
            assert not event.finished
    assert event.usage is not None and event.usage.output >= 1
    await stream.aclose()


@pytest.mark.parametrize(
    ("fields", "param", "kind"),
    [
        ({"messages": [{"role": "user", "content": "x" * 4093}]}, "messages", ContextTooLong),
        ({"max_tokens": 4089}, "messages", ContextTooLong),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", BadField),
        ({"min_tokens": 4089}, "min_tokens", BadField),
        ({"logit_bias": {"260": 1}}, "logit_bias", BadField),
        ({"stop_token_ids": [3, 260]}, "stop_token_ids", BadField),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", BadField),
    ],
)
async def test_what_is_refused_while_preparing(
    make: Make, says: Says, fields: Mapping[str, Any], param: str, kind: type[BadField]
) -> None:
    with pytest.raises(kind) as caught:
        await make(says("x")).prepare(chat(**fields))
    assert caught.value.param == param


async def test_too_long_is_said_in_openais_words(make: Make, says: Says) -> None:
    replica = make(says("x"))
    with pytest.raises(ContextTooLong) as caught:
        await replica.prepare(chat(max_tokens=5000))
    assert caught.value.message == (
        "This model's maximum context length is 4096 tokens. However, you requested 5008 tokens "
        "(8 in the messages, 5000 in the completion). Please reduce the length of the messages or "
        "completion."
    )
    fits = await replica.prepare(chat(max_tokens=4096 - PROMPT_TOKENS))
    assert fits.max_output_tokens == 4088


async def test_the_worst_case_to_hold(make: Make, says: Says) -> None:
    replica = make(says("x"))
    open_ended = await replica.prepare(chat(n=2))
    assert (open_ended.max_output_tokens, open_ended.max_tokens_given) == (2 * 4088, False)
    assert open_ended.input_tokens == PROMPT_TOKENS
    given = await replica.prepare(chat(max_completion_tokens=5))
    assert (given.max_output_tokens, given.max_tokens_given) == (5, True)


async def test_the_roles_reach_the_template(make: Make, says: Says, tokenizer: Tokenizer) -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}],
        },
        {"role": "user", "content": "hi"},
    ]
    prepared = await make(says("x")).prepare(chat(messages=messages))
    rendered = "<system>be\nkind</s><user>hi</s><assistant>"
    assert prepared.payload.rendered.token_ids == tokenizer.encode(rendered)


async def test_a_long_prompt_is_prepared_in_a_thread(make: Make, says: Says) -> None:
    prepared = await make(says("x")).prepare(
        chat(messages=[{"role": "user", "content": "x" * 3000}])
    )
    assert prepared.input_tokens == 3003


async def test_a_full_engine(make: Make, tokenizer: Tokenizer) -> None:
    engine = fake(tokenizer, drawn, max_waiting=1)
    before = SamplingParams(max_tokens=1)
    engine.core.add(EngineRequest(request_id="before", prompt_token_ids=[1], sampling=before))
    with pytest.raises(ReplicaOverloaded):
        await run(make(engine), chat())


class Scripted:
    """An engine that sends just these outputs, and then raises."""

    def __init__(self, engine: FakeEngine, outputs: list[EngineOutput], error: Exception) -> None:
        self.status, self.connected, self.on_orphan = engine.status, True, None
        self.outputs, self.error = outputs, error
        self.aborted: list[str] = []
        self.acknowledged: list[str] = []

    async def generate(
        self, request: EngineRequest, take: Take | None = None, *, at_once: bool = False
    ) -> AsyncGenerator[EngineOutput, None]:
        for output in self.outputs:
            yield output
        raise self.error

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def acknowledge(self, request_id: str) -> None:
        self.acknowledged.append(request_id)


def output(generated: int, ids: list[int], **fields: Any) -> EngineOutput:
    usage = Usage(prompt_tokens=8, generated_tokens=generated, prefilled=True)
    return EngineOutput(request_id="a", usage=usage, token_ids=ids, **fields)


@pytest.mark.parametrize(("num_messages", "inline"), [(4, True), (100, False)])
async def test_many_empty_messages_are_prepared_beside_the_event_loop(
    make: Make,
    says: Says,
    template: ChatTemplate,
    monkeypatch: pytest.MonkeyPatch,
    num_messages: int,
    inline: bool,
) -> None:
    rendered_in: list[int] = []

    def render(messages: list[dict[str, Any]], **_: Any) -> str:
        rendered_in.append(threading.get_ident())
        return "hello"

    monkeypatch.setattr(template, "render", render)
    await make(says("x")).prepare(chat(messages=[{"role": "user", "content": ""}] * num_messages))
    assert [ident == threading.get_ident() for ident in rendered_in] == [inline]


async def test_a_failed_step_is_a_loss_only_after_the_first_output(make: Make, says: Says) -> None:
    failed = output(1, [], finish_reason="error", error_code="engine_step_failed", finished=True)
    gone = EngineUnavailable("gone")
    with pytest.raises(ReplicaUnavailable):
        await run(make(Scripted(says("x"), [failed], gone)), chat())
    events: list[ReplicaEvent] = []
    with pytest.raises(ReplicaLost):
        await run(make(Scripted(says("x"), [output(1, [70]), failed], gone)), chat(), events)
    assert [event.finished for event in events] == [False]


@pytest.mark.parametrize("begun", [[], [output(1, [70])]])
async def test_a_grammar_that_gives_up_is_told_by_its_field(
    make: Make, says: Says, begun: list[EngineOutput]
) -> None:
    """It is the client's, and says nothing of the engine."""
    failed = output(1, [], finish_reason="error", error_code="grammar_exhausted", finished=True)
    scripted = Scripted(says("x"), [*begun, failed], EngineUnavailable("gone"))
    with pytest.raises(BadField, match="needs too much work amid the output") as raised:
        await run(make(scripted), chat(guided_regex="a{99999999}"))
    assert raised.value.param == "guided_regex"


async def test_a_failed_step_ends_all_choices_and_is_one_loss(make: Make, says: Says) -> None:
    failed = [
        output(3, [], index=i, finish_reason="error", error_code="failed", finished=i == 1)
        for i in range(2)
    ]
    begun = [output(1, [70]), output(3, [70, 71], index=1)]
    events: list[ReplicaEvent] = []
    scripted = Scripted(says("x"), [*begun, *failed], EngineUnavailable("gone"))
    with pytest.raises(ReplicaLost):
        await run(make(scripted), chat(n=2), events)
    assert events[-1].usage is not None and events[-1].usage.output == 3


async def test_an_engine_lost_after_the_whole_answer_was_given_is_no_loss(
    make: Make, says: Says, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("a!bc")
    scripted = Scripted(says("x"), [output(4, ids)], EngineUnavailable("gone"))
    events = await run(make(scripted), chat(stop="!"))
    assert scripted.aborted == ["a"]
    assert (text(events), reasons(events)) == ("a", ["stop"])
    usage = last_usage(events)
    assert (usage.output, usage.wasted_output) == (2, 2)


async def test_a_refusal_of_the_engines_own_names_the_clients_field(make: Make, says: Says) -> None:
    error = InvalidRequest("between 0 and 20", param="logprobs")
    with pytest.raises(BadField) as caught:
        await run(make(Scripted(says("x"), [], error)), chat())
    assert caught.value.param == "top_logprobs"


async def test_replicas_that_share_an_engine_ask_for_their_own_adapters(
    make: Make, says: Says
) -> None:
    engine = says("ok", adapters={"legal": Path("legal"), "terse": Path("terse")})
    request = chat(messages=[{"role": "user", "content": "x" * 40}])
    for _ in range(2):
        for adapter in ("", "legal", "terse"):
            await run(make(engine, adapter), request)
    replicas = [make(engine, adapter) for adapter in ("legal", "")]
    assert [last_usage(await run(each, request)).cache_read for each in replicas] == [32, 32]
    assert engine.status.prefix_cache_hit_tokens == 5 * 32, "each of three computed it once"
    for replica in replicas:
        await replica.close()


async def test_an_adapter_that_the_engine_lacks_is_away_and_no_customers_mistake(
    make: Make, says: Says
) -> None:
    with pytest.raises(ReplicaUnavailable, match="no such adapter"):
        await run(make(says("ok"), "legal"), chat())


async def test_the_engine_hears_whose_turn_it_is(make: Make, tokenizer: Tokenizer) -> None:
    heard: list[EngineRequest] = []

    def respond(request: EngineRequest, index: int) -> Iterator[int]:
        heard.append(request)
        return iter([5])

    replica = make(fake(tokenizer, respond))
    priority = Priority(lane="agentic", tenant="org_a", weight=2.0, deadline_s=30.0)
    prepared = await replica.prepare(chat())
    async for _ in replica.stream(prepared, attempt_id="a", cache_salt="", priority=priority):
        continue
    (request,) = {id(each): each for each in heard}.values()
    assert (
        Priority(
            lane=request.lane,
            tenant=request.tenant,
            weight=request.weight,
            deadline_s=request.deadline_s,
        )
        == priority
    )


async def test_a_stream_that_rests_says_nothing_until_it_goes_on(
    make: Make, tokenizer: Tokenizer
) -> None:
    replica = make(fake(tokenizer, lambda request, index: iter([5] * 10_000)))
    stream = replica.stream(await replica.prepare(chat()), attempt_id="a", cache_salt="")
    await anext(stream)
    await replica.set_paused("a", paused=True)
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(anext(stream))
    for _ in range(3):
        # what a step brought that was under way may still come
        done, _ = await asyncio.wait((waiting,), timeout=0.05)
        if done:
            waiting = asyncio.create_task(anext(stream))
    assert not waiting.done()
    await replica.set_paused("a", paused=False)
    async with asyncio.timeout(30):
        assert (await waiting).items
    await stream.aclose()


async def test_the_first_token_is_predicted_by_what_waits_and_what_is_not_cached(
    make: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake(tokenizer, lambda request, index: iter([5]))
    replica = make(engine)
    prepared = await replica.prepare(chat(messages=[{"role": "user", "content": "word " * 400}]))
    priority = Priority(lane="agentic", tenant="org_a")
    assert replica.predicted_ttft_s(prepared, priority) is None, "nothing is learnt yet"
    costs, lanes = StepCosts(prompt_token_s=0.01), {"agentic": LaneStatus(waiting_tokens=1000)}
    replica.view = EngineView(SentWork(), clock=lambda: 0.0)
    replica.view.heard(msgspec.structs.replace(engine.status, costs=costs, lanes=lanes))
    size = len(prepared.payload.rendered.token_ids)
    predicted_s = replica.predicted_ttft_s(prepared, priority)
    assert predicted_s == pytest.approx((1000 + size) / 100)
    async for _ in replica.stream(prepared, attempt_id="a", cache_salt="", priority=priority):
        continue
    cached = size // 128 * 128
    predicted_s = replica.predicted_ttft_s(prepared, priority)
    assert cached and predicted_s == pytest.approx((1000 + size - cached) / 100)
    engine.lose()
    assert replica.predicted_ttft_s(prepared, priority) is None
