"""Lets an upstream say anything in any order: it is a claim, and no more is
billed than the request can have used, and the rest is disputed to the token."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from billing.events import Band, Price, PriceSet
from gateway.fleet.upstream.answer_bound import BYTES_PER_TOKEN, LONG_TOKEN_BYTES, SLACK_BYTES
from gateway.fleet.upstream.bounds import UpstreamBounds
from gateway.fleet.upstream.meter import BrokenAnswer, UpstreamMeter
from gateway.fleet.upstream.usage_claim import (
    MOST_COUNT,
    UsageBound,
    bound_usage,
    read_claim,
    to_count,
)
from gateway.generation_events import MeteredUsage
from gateway.inference.metering import rated
from gateway.limits.spending import spending_of, to_nano
from gateway.principal import Principal, SpendCap
from tests.billing.samples import an_attempt
from tests.budget import examples
from tests.gateway.fleet.upstream.scripted_upstream import new_meter

COUNTS = st.integers(0, MOST_COUNT)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(0, 200),
    st.floats(),
    st.sampled_from(
        [None, True, "7", "-7", "1e9", "", [], {}, 2**63, 10**12, 0.5, 12.0, 10**400, -(10**400)]
    ),
)
CLAIMS = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), NUMBERS),
            "prompt_cache_hit_tokens": NUMBERS,
            "prompt_tokens_details": NUMBERS
            | st.fixed_dictionaries(
                {}, optional={"cached_tokens": NUMBERS, "cache_write_tokens": NUMBERS}
            ),
            "completion_tokens_details": NUMBERS
            | st.fixed_dictionaries({}, optional={"reasoning_tokens": NUMBERS}),
        },
    ),
    NUMBERS,
)
METERED = st.builds(
    MeteredUsage,
    uncached_input=COUNTS,
    cache_read=COUNTS,
    cache_write=COUNTS,
    cache_write_1h=COUNTS,
    embedding_input=COUNTS,
    output=COUNTS,
    reasoning_output=COUNTS,
)


@given(METERED, st.integers(0, 2**40), st.integers(0, 2**40))
def test_what_is_billed_and_what_is_disputed_are_what_was_claimed(
    claimed: MeteredUsage, most_input: int, most_output: int
) -> None:
    billed = bound_usage(claimed, UsageBound(most_input, most_output))
    assert billed.prompt_tokens <= most_input and billed.output <= most_output
    assert billed.prompt_tokens + billed.disputed_input == claimed.prompt_tokens
    assert billed.output + billed.disputed_output == claimed.output
    assert 0 <= billed.reasoning_output <= max(billed.output, claimed.reasoning_output)
    for name in ("uncached_input", "cache_read", "cache_write", "cache_write_1h"):
        assert 0 <= getattr(billed, name) <= getattr(claimed, name)
    assert bound_usage(billed, UsageBound(most_input, most_output)) == billed, "a bound holds twice"


PICOS = st.integers(0, 10**7)
PRICE = st.builds(
    lambda pico, band, dearer: Price("p", pico, (Band(band, "b", dearer),)),
    PICOS,
    st.integers(1, 2000),
    PICOS,
)
PRICES = st.fixed_dictionaries(
    {"uncached_input": PRICE, "output": PRICE},
    optional={
        **dict.fromkeys(("cache_read", "cache_write_5m", "embedding_input"), PRICE),
        **dict.fromkeys(("reasoning_output", "batch_queue"), PRICE),
    },
)


@given(METERED, st.integers(1, 1000), st.integers(0, 1000), PRICES, st.booleans())
def test_nothing_costs_more_than_what_is_held_for_it(
    claimed: MeteredUsage, most_input: int, most_output: int, prices: PriceSet, is_batch: bool
) -> None:
    claimed = msgspec.structs.replace(
        claimed, cache_write_1h=0, reasoning_output=min(claimed.output, claimed.reasoning_output)
    )
    billed = bound_usage(claimed, UsageBound(most_input, most_output))
    caller = Principal(
        org_id="o",
        project_id="p",
        key_id="k",
        key_hint="",
        scopes=frozenset(),
        spend_caps=(SpendCap("key", "k", "total", 1),),
    )
    held = spending_of(
        caller,
        "big",
        prices,
        input_tokens=most_input,
        max_output_tokens=most_output,
        min_output_tokens=0,
        admitted_at=0.0,
    )
    attempt = an_attempt(prices=prices, lane="batch" if is_batch else "interactive")
    assert held is not None
    assert to_nano(rated(billed, attempt).amount_pico) <= held.hold_nano


def test_what_costs_most_is_cut_off_first() -> None:
    claimed = MeteredUsage(cache_read=10, uncached_input=10, cache_write=10, cache_write_1h=10)
    billed = bound_usage(claimed, UsageBound(15, 0))
    assert billed == MeteredUsage(cache_read=10, uncached_input=5, disputed_input=25)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *((b"7", 7), (b"7.0", 7), (b'"7"', 7), (b"0", 0)),
        *((b"9223372036854775808", MOST_COUNT), (b"1e400", MOST_COUNT), (b"1" * 5000, MOST_COUNT)),
        *((b"1" * digits, MOST_COUNT) for digits in (20, 309, 400, 4300)),
        (b"-" + b"1" * 400, None),
        *((text, None) for text in (b"-1", b"-1e400", b"7.5", b"null", b"true", b"[7]", b"{}")),
        *((text, None) for text in (b'"-7"', b'"1e9"', b'"' + b"1" * 400 + b'"', b"NaN", b"")),
    ],
)
def test_a_count_is_a_whole_number(text: bytes, count: int | None) -> None:
    assert to_count(msgspec.Raw(text)) == count


def test_one_count_that_cannot_be_read_does_not_hide_the_others() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": -1, "prompt_tokens_details": "many"}
    assert read_claim(json.dumps(usage).encode()) == MeteredUsage(uncached_input=5)


SAID = {"type": "text", "text": "What is seen?"}
LINKED = {"type": "image_url", "image_url": {"url": "https://images.example/1.png"}}
INLINE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}


@given(
    st.text(max_size=50),
    st.lists(st.sampled_from([LINKED, INLINE]), max_size=5),
    st.integers(1, 10**6),
    st.booleans(),
)
def test_a_request_is_bounded_by_its_text_and_its_images(
    text: str, images: list[Any], image_tokens: int, counts: bool
) -> None:
    """Each image adds as much as any other, and none of its bytes."""
    encode = (lambda told: [0] * len(told.encode(errors="replace"))) if counts else None
    bounds = UpstreamBounds(None, None, "max_tokens", encode, image_tokens)

    def most(*parts: Any) -> int:
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]}
        payload = json.dumps(body, ensure_ascii=False).encode(errors="replace")
        found = bounds.input_size(body, payload, is_capped=True).most
        assert found is not None
        return found

    alone, seen = most(), most(*images)
    size_bytes = len(text.encode(errors="replace"))
    assert alone >= size_bytes
    added = seen - alone - image_tokens * len(images)
    assert 0 <= added <= len(images) * len(json.dumps(LINKED) + ", ")


class UpstreamWord(RuleBasedStateMachine):
    """An upstream that says anything in any order. The model: what was claimed last, and what was
    written since."""

    @initialize(
        window=st.none() | st.integers(1, 300),
        images=st.lists(st.sampled_from([LINKED, INLINE]), max_size=3),
        image_tokens=st.integers(1, 90),
        most_output=st.integers(0, 60),
        estimate=st.integers(1, 400),
    )
    def begin(
        self,
        window: int | None,
        images: list[Any],
        image_tokens: int,
        most_output: int,
        estimate: int,
    ) -> None:
        """The bound is what is held of a request with those images."""
        body = {"messages": [{"role": "user", "content": [SAID, *images]}]}
        bounds = UpstreamBounds(window, None, "max_tokens", None, image_tokens)
        size = bounds.input_size(body, json.dumps(body).encode(), is_capped=True)
        assert size.most is not None
        self.bounds = UsageBound(size.most, most_output)
        self.meter = new_meter(
            input_tokens=estimate, most_input=size.most, most_output=most_output, n=2
        )
        self.claimed: MeteredUsage | None = None
        self.shown: list[int] = []
        """The bytes of text of each chunk that was passed on."""
        self.is_broken = False

    def read(self, event: Any) -> None:
        if self.is_broken or self.meter.done:
            return
        try:
            item = self.meter.read_event(json.dumps(event).encode())
        except BrokenAnswer:
            self.is_broken = True
            return
        if item is not None:
            for choice in json.loads(item.payload)["choices"]:
                text = choice.get("delta", {}).get("content") or ""
                self.shown += [len(text.encode())] if text else []
        if self.meter.is_over:
            self.check_end(json.loads(self.meter.cut().payload))

    def check_end(self, last: Any) -> None:
        assert {each["finish_reason"] for each in last["choices"]} <= {"length"}
        assert self.meter.done and self.meter.usage.is_disputed

    @rule(usage=CLAIMS, text=st.sampled_from(["", "word "]), with_choices=st.booleans())
    def claim(self, usage: Any, text: str, with_choices: bool) -> None:
        assume(not (isinstance(usage, float) and usage != usage))
        choice = {"index": 0, "delta": {"content": text}}
        before = self.meter.done or self.is_broken
        self.read({"choices": [choice] if with_choices else [], "usage": usage})
        try:
            found = None if before or self.is_broken else read_claim(json.dumps(usage).encode())
        except msgspec.DecodeError:
            found = None
        if found is not None and not self.meter.is_over:
            self.claimed = found

    @rule(
        text=st.sampled_from(["w", "word ", "a longer word ", "x" * 200]), index=st.integers(0, 1)
    )
    def write(self, text: str, index: int) -> None:
        self.read({"choices": [{"index": index, "delta": {"content": text}}], "usage": None})

    @rule(index=st.integers(0, 1), reason=st.sampled_from(["stop", "length", None]))
    def finish(self, index: int, reason: str | None) -> None:
        self.read({"choices": [{"index": index, "delta": {}, "finish_reason": reason}]})

    @rule()
    def restart(self) -> None:
        """A second answer of the same attempt's bounds: nothing of the first is left."""
        again = new_meter(
            input_tokens=1,
            most_input=self.bounds.input_tokens,
            most_output=self.bounds.output_tokens,
            n=2,
        )
        self.meter, self.claimed, self.shown, self.is_broken = again, None, [], False

    @invariant()
    def no_more_is_billed_than_was_possible(self) -> None:
        usage = self.meter.usage
        assert 0 <= usage.prompt_tokens <= self.bounds.input_tokens
        assert 0 <= usage.reasoning_output <= usage.output <= self.bounds.output_tokens
        assert min(usage.uncached_input, usage.cache_read, usage.cache_write) >= 0

    @invariant()
    def what_was_claimed_beyond_is_disputed(self) -> None:
        if self.claimed is None or self.meter.is_over:
            return
        usage = self.meter.usage
        assert usage.prompt_tokens + usage.disputed_input == self.claimed.prompt_tokens
        more = max(0, self.claimed.output - self.bounds.output_tokens)
        assert usage.disputed_output == more

    @invariant()
    def no_more_is_shown_than_an_honest_answer_may_have(self) -> None:
        most = self.bounds.output_tokens
        counted = min(len(self.shown), sum(self.shown) // BYTES_PER_TOKEN)
        assert counted <= most
        assert sum(self.shown) <= most * LONG_TOKEN_BYTES + 2 * SLACK_BYTES


TestUpstreamWord = UpstreamWord.TestCase
TestUpstreamWord.settings = settings(max_examples=examples(60), stateful_step_count=40)


def body_of(text: str, **usage: int) -> bytes:
    message = {"role": "assistant", "content": text, "reasoning_content": "hm"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": []}}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def shown(meter: UpstreamMeter, body: bytes) -> Any:
    return json.loads(meter.read_body(body).payload)["choices"][0]


def test_a_whole_answer_that_is_too_long_is_cut() -> None:
    meter = new_meter(most_output=20)
    cut = shown(meter, body_of("word " * 2000, prompt_tokens=9, completion_tokens=2000))
    assert cut["finish_reason"] == "length" and cut["logprobs"] is None
    assert len(cut["message"]["content"]) <= 20 * 8 + SLACK_BYTES
    assert meter.usage == MeteredUsage(uncached_input=9, output=20, disputed_output=1980)


def test_a_whole_answer_is_cut_whatever_it_claims() -> None:
    meter = new_meter(most_output=20)
    cut = shown(meter, body_of("word " * 2000, prompt_tokens=9, completion_tokens=3))
    assert cut["finish_reason"] == "length"
    assert len(cut["message"]["content"]) <= 20 * LONG_TOKEN_BYTES + SLACK_BYTES
    assert (meter.usage.output, meter.usage.is_disputed) == (3, True)


def test_an_honest_answer_under_a_false_count_is_whole() -> None:
    meter = new_meter(most_output=20)
    text = "twenty tokens have a hundred bytes or so " * 3
    whole = shown(meter, body_of(text, prompt_tokens=9, completion_tokens=10**12))
    assert (whole["message"]["content"], whole["finish_reason"]) == (text, "stop")
    assert meter.usage.output == 20 and meter.usage.disputed_output == 10**12 - 20


def test_calls_that_do_not_fit_are_left_out_whole() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 90_000}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    cut = shown(new_meter(most_output=20), json.dumps(body).encode())
    assert cut["finish_reason"] == "length" and cut["message"]["tool_calls"] is None


def test_an_answer_that_is_slow_to_read_is_a_fault() -> None:
    choice = {"index": 0, "delta": {"content": "x"}, "logprobs": {"content": [10**300]}}
    with pytest.raises(BrokenAnswer, match="a number of more than 256 characters"):
        new_meter().read_event(json.dumps({"choices": [choice]}).encode())


def test_a_choice_that_nobody_asked_for_is_a_fault() -> None:
    for index in (1, -1, 2**40):
        with pytest.raises(BrokenAnswer):
            new_meter().read_event(
                json.dumps({"choices": [{"index": index, "delta": {"content": "x"}}]}).encode()
            )


@pytest.mark.parametrize("field", ["content", "reasoning_content", "refusal", "role"])
@pytest.mark.parametrize("value", [5, True, {}, {"text": "x"}, -0.5])
def test_what_is_no_text_is_a_fault(field: str, value: Any) -> None:
    choice = {"index": 0, "finish_reason": "stop"}
    for said in ({"delta": {field: value}}, {"message": {field: value}}):
        data = json.dumps({"choices": [choice | said]}).encode()
        with pytest.raises(BrokenAnswer, match=field):
            read = new_meter().read_event if "delta" in said else new_meter().read_body
            read(data)
    if field == "content":
        data = json.dumps({"choices": [choice | {"text": value}]}).encode()
        with pytest.raises(BrokenAnswer, match="text is no text"):
            new_meter().read_event(data)


def test_a_stream_without_text_ends() -> None:
    meter = new_meter()
    silent = json.dumps({"choices": [{"index": 0, "delta": {}}]}).encode()
    with pytest.raises(BrokenAnswer, match="without text"):
        for _ in range(20_000):
            meter.read_event(silent)
