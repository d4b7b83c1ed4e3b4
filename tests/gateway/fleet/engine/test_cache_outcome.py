"""The cause that is told of a prompt, against all prompts before it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from billing.cache_contracts import Breakpoint
from engine.fake.engine import FAKE_CONFIG, FakeCore, FakeEngine
from engine.protocol import SeenPrefix
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.cache_outcome import (
    PREFIX_CHARS,
    PREFIX_TOKENS,
    Circumstances,
    outcome_of,
    prefix_digest,
    text_digest,
)
from gateway.fleet.engine.model_format import ModelFormat
from gateway.fleet.engine.prefix_memory import EarlierPrompt
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import MessagePlace
from gateway.generate_request import (
    ChatPrompt,
    CompletionPrompt,
    GenerateRequest,
    PlainForward,
    WrittenIds,
)
from gateway.generation_events import CachedTokens, CacheOutcome, MeteredUsage
from gateway.lanes import Priority
from gateway.wire.openai.from_chat import from_openai
from tests.budget import examples

BLOCK, SPAN_TOKENS = 16, 128
PENNY = Path(__file__).resolve().parents[4] / "models/penny"
TURN = Priority(tenant="org_a")


def written(ids: Iterable[int]) -> WrittenIds:
    return WrittenIds(b",".join(b"%d" % each for each in ids), "prompt")


class Served:
    """One model, by an engine of so many blocks; another one may come in its place."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, threads: PrepareThreads, **options: Any
    ) -> None:
        self._options, self._number = options, 0
        self.replica = EngineReplica(
            name="m", client=self.engine(), tokenizer=tokenizer, template=template, threads=threads
        )

    def engine(self) -> FakeEngine:
        return FakeEngine(FakeCore(replace(FAKE_CONFIG, **self._options)))

    def restart(self) -> None:
        self.replica._client = self.engine()

    async def ask(
        self, token_ids: list[int], logprobs: int | None = None
    ) -> tuple[CacheOutcome, MeteredUsage]:
        asked = CompletionPrompt(
            prompts=(written(token_ids),),
            max_tokens=1,
            logprobs=logprobs,
            echo=logprobs is not None,
        )
        request = GenerateRequest(model="m", stream=False, include_usage=False, completion=asked)
        prepared = await self.replica.prepare(request, TURN)
        self._number += 1
        stream = self.replica.stream(
            prepared, attempt_id=f"{self._number}", cache_salt="salt", priority=TURN
        )
        *_, last = [event async for event in stream]
        assert last.finished and last.cache is not None and last.usage is not None
        return last.cache, last.usage


piece = st.tuples(st.integers(0, 2), st.integers(1, 40))
prompts = st.lists(st.lists(piece, min_size=1, max_size=4), min_size=1, max_size=8)


@given(asked=prompts, num_blocks=st.sampled_from((4, 12, 4096)))
@settings(max_examples=examples(60), deadline=None)
def test_a_cause_is_true_of_all_prompts_before(
    asked: list[list[tuple[int, int]]],
    num_blocks: int,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> None:
    async def work() -> None:
        options = {"num_blocks": num_blocks, "max_model_len": BLOCK * 4}
        served = Served(tokenizer, template, threads, **options)
        earlier: list[list[int]] = []
        for pieces in asked:
            ids = [10 + letter for letter, times in pieces for _ in range(times)][: BLOCK * 4 - 1]
            told, used = await served.ask(ids)
            check(told, used, ids, earlier)
            earlier.append(ids)

    threads = PrepareThreads()
    asyncio.run(work())
    threads.close()


def check(
    told: CacheOutcome, used: MeteredUsage, ids: list[int], earlier: Sequence[list[int]]
) -> None:
    same = max((len(os.path.commonprefix([ids, each])) for each in earlier), default=0)
    cacheable = min(same, len(ids) - 1) // BLOCK * BLOCK
    goes_on = [each[same : same + 1] for each in earlier if each[:same] == ids[:same]]
    match told.cause:
        case "too_short":
            assert len(ids) <= BLOCK and not used.cache_read
        case "first":
            assert same == 0
        case "evicted":
            assert used.cache_read < cacheable and told.position == used.cache_read
        case "changed":
            assert told.position == same < len(ids) and used.cache_read == cacheable
            assert [] not in goes_on, "it ended there, and this one goes on"
        case "intact":
            assert used.cache_read == cacheable
            assert same == len(ids) or [] in goes_on
        case _:
            raise AssertionError(told.cause)


async def test_another_process_in_its_place_has_nothing_of_what_went_to_the_one_before(
    tokenizer: Tokenizer, template: ChatTemplate, threads: PrepareThreads
) -> None:
    served = Served(tokenizer, template, threads)
    long = [*range(10, 10 + 2 * SPAN_TOKENS)]
    assert (await served.ask(long))[0].cause == "first"
    assert (await served.ask(long))[0].cause == "intact"
    served.restart()
    assert (await served.ask(long[:40]))[0].cause == "first", "too short to be known by"
    told, used = await served.ask(long)
    assert (told.cause, told.position, used.cache_read) == ("restarted", 40, 32)
    assert (await served.ask(long))[0].cause == "intact"
    assert (await served.ask([*long[:200], 5]))[0] == CacheOutcome(
        cause="changed",
        position=200,
        prefix=prefix_digest("salt", long),
        found=CachedTokens(pool=192),
    )


async def test_where_no_prefix_is_looked_for_nobody_can_say(
    tokenizer: Tokenizer, template: ChatTemplate, threads: PrepareThreads
) -> None:
    long = [*range(10, 10 + SPAN_TOKENS)]
    served = Served(tokenizer, template, threads)
    assert (await served.ask(long))[0].cause == "first"
    assert (await served.ask(long, logprobs=1))[0].cause == "unknown"
    without = Served(tokenizer, template, threads, prefix_caching=False)
    assert [(await without.ask(long))[0].cause for _ in range(2)] == ["first", "unknown"]


def marked(*positions: int, **others: Any) -> Circumstances:
    """Return the circumstances of a model that keeps what is marked."""
    told = tuple(Breakpoint(each) for each in positions)
    fields = {"is_marked": True, "before": EarlierPrompt(), "breakpoints": told} | others
    return Circumstances(contract="explicit", block_size=BLOCK, engine_id="e", **fields)


@pytest.mark.parametrize(
    ("here", "seen", "read", "expected"),
    [
        (marked(is_marked=False), SeenPrefix(3000, "repeated"), 0, ("unmarked", 0)),
        (marked(), SeenPrefix(3000, "repeated"), 0, ("too_short", 0)),
        (marked(2048), None, 0, ("first", 0)),
        (marked(2048), SeenPrefix(2500, "broken"), 2048, ("intact", 0)),
        (marked(2048), SeenPrefix(2500, "broken"), 0, ("not_kept", 0)),
        (marked(2048), SeenPrefix(1999, "broken"), 0, ("changed", 1999)),
        (marked(2048), SeenPrefix(2500, "continued", 400), 0, ("evicted", 2096)),
        (marked(1024, 2048), SeenPrefix(1500, "broken"), 1024, ("changed", 1500)),
        (marked(1024, 2048), SeenPrefix(1500, "continued"), 1024, ("intact", 0)),
        (marked(2048, before=EarlierPrompt(2500, "d")), None, 0, ("restarted", 0)),
    ],
)
def test_what_is_kept_for_a_time_has_causes_of_its_own(
    here: Circumstances, seen: SeenPrefix | None, read: int, expected: tuple[str, int]
) -> None:
    assert outcome_of(here, 3000, seen, read) == expected


def test_a_minimum_of_the_contract_is_told_before_all_else() -> None:
    here = Circumstances(
        contract="automatic", block_size=BLOCK, engine_id="e", before=EarlierPrompt()
    )
    seen = SeenPrefix(1024, "repeated")
    assert outcome_of(here, 1024, seen, 0) == ("too_short", 0), "its last token is computed"
    assert outcome_of(here, 1041, seen, 1024) == ("intact", 0)


def test_a_digest_tells_nothing_across_namespaces() -> None:
    ids = [*range(PREFIX_TOKENS)]
    assert prefix_digest("a", ids) == prefix_digest("a", [*ids, 7])
    others = {prefix_digest("b", ids), prefix_digest("a", [1, *ids]), prefix_digest("a", ids[1:])}
    assert prefix_digest("a", ids) not in others and prefix_digest("a", ids[1:]) == ""


def forwarded(*contents: Any, **fields: Any) -> GenerateRequest:
    messages = [{"role": "user", "content": each} for each in contents]
    body = {"model": "far", "messages": messages, **fields}
    return from_openai(json.dumps(body).encode(), "upstream")


def test_where_tokens_are_not_known_a_prompt_is_told_by_its_first_characters() -> None:
    long = "ab" * PREFIX_CHARS
    whole = text_digest("org", forwarded(long, "tail"))
    assert whole == text_digest("org", forwarded(long, temperature=0.5)) != ""
    assert whole == text_digest("org", forwarded([{"type": "text", "text": long}]))
    assert whole != text_digest("other", forwarded(long))
    assert whole != text_digest("org", forwarded("c" + long))
    assert text_digest("org", forwarded("short", "shorter")) == ""
    ids = PlainForward(path="completions", prompts=(written(range(PREFIX_CHARS)),))
    plain = GenerateRequest(model="far", stream=False, include_usage=False, plain=ids)
    assert text_digest("org", plain) != ""


# ---- in which message

words = st.text("ab ü😀", min_size=1, max_size=12)
roles = st.sampled_from(("system", "user", "assistant"))


def prompt_of(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    body = {"model": "m", "messages": messages, **fields}
    prompt = from_openai(json.dumps(body).encode(), "engine").prompt
    assert prompt is not None
    return prompt


def place(form: ModelFormat, prompt: ChatPrompt, earlier: ChatPrompt) -> MessagePlace | None:
    """Find where the one prompt differs from the other."""
    ids, before = form.render(prompt, 4096).token_ids, form.render(earlier, 4096).token_ids
    return form.place_of(prompt, ids, len(os.path.commonprefix([ids, before])))


@given(found=st.lists(st.tuples(roles, words), min_size=1, max_size=9), data=st.data())
@settings(deadline=None)
def test_a_change_is_found_in_its_message(
    found: list[tuple[str, str]], data: st.DataObject, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in found]
    index = data.draw(st.integers(0, len(messages) - 1))
    at = data.draw(st.integers(0, len(messages[index]["content"]) - 1))
    changed = [dict(each) for each in messages]
    text = changed[index]["content"]
    changed[index]["content"] = text[:at] + "x" + text[at + 1 :]
    form = ModelFormat(tokenizer, template)
    for one, other in ((messages, changed), (changed, messages)):
        told = place(form, prompt_of(*one), prompt_of(*other))
        assert told == MessagePlace(f"messages[{index}]", index, messages[index]["role"])


def test_with_a_real_vocabulary_and_tools() -> None:
    form = ModelFormat(Tokenizer.load(PENNY), ChatTemplate.load(PENNY))
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}

    def tool(text: str) -> dict[str, Any]:
        function = {"name": "look", "description": text, "parameters": {"type": "object"}}
        return {"type": "function", "function": function}

    one = prompt_of(system, user, tools=[tool("Looks up.")])
    assert place(form, one, prompt_of(system, user, tools=[tool("Looks down.")])) == (
        MessagePlace("tools")
    )
    other = {"role": "system", "content": "Be wordy."}
    tools = {"tools": [tool("Looks up.")]}
    assert place(form, one, prompt_of(other, user, **tools)) == (
        MessagePlace("messages[0]", 0, "system")
    )
    said = {"role": "user", "content": "Ho"}
    assert place(form, one, prompt_of(system, said, **tools)) == (
        MessagePlace("messages[1]", 1, "user")
    )
    longer = prompt_of(system, user, {"role": "assistant", "content": "Hi"}, user)
    shorter = prompt_of(system, user)
    assert place(form, longer, shorter) == MessagePlace("messages[2]", 2, "assistant")
    assert place(form, shorter, longer) is None, "where the answer begins is no message's"
