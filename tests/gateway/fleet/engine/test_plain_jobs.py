"""Prompts of token ids, from the body to the engine: bounded by the context, each fault by its
place."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.fake.engine import FakeEngine
from engine.protocol import EngineOutput, Grammar, Usage
from engine.text.tokenizer import Tokenizer
from foundation.json_values import MAX_VALUES
from gateway.fleet.engine.job import EngineJob
from gateway.fleet.engine.plain_jobs import PlainJobs
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import PreparedRequest
from gateway.generate_request import PART_BYTES, GenerateRequest, PlainForward, WrittenIds
from gateway.generation_events import TextDelta
from gateway.lanes import Priority
from gateway.request_errors import BadField, ContextTooLong
from gateway.wire.openai.completions import from_completions
from gateway.wire.openai.embeddings import from_embeddings
from gateway.wire.openai.tokenizing import from_detokenize
from tests.budget import examples

MILLION = 1_000_000
VOCAB_SIZE = 150_000
TURN = Priority(tenant="org")
Read = Callable[[bytes, Any], GenerateRequest]
SURFACES = [(from_completions, "prompt"), (from_embeddings, "input")]


class Model:
    """A model that only prepares: its tokenizer is asked of nothing but texts."""

    def __init__(self, tokenizer: Tokenizer, threads: PrepareThreads, max_model_len: int) -> None:
        self.jobs = PlainJobs(tokenizer, threads, "none")
        status = FakeEngine().status
        self.status = replace(status, max_model_len=max_model_len, vocab_size=VOCAB_SIZE)

    async def prepare(self, request: GenerateRequest) -> PreparedRequest:
        if request.completion is not None:
            return await self.jobs.to_complete(request, request.completion, self.status, TURN, "")
        assert request.embedding is not None
        return await self.jobs.to_embed(request, request.embedding, self.status, TURN)


@pytest.fixture
def model(tokenizer: Tokenizer, threads: PrepareThreads) -> Model:
    return Model(tokenizer, threads, MILLION + 16)


def body_of(field: str, value: Any) -> bytes:
    return json.dumps({"model": "m", field: value}).encode()


def prompt_of(prepared: PreparedRequest) -> list[int]:
    found: list[int] = prepared.payload.request.prompt_token_ids
    return found


@pytest.mark.parametrize(("read", "field"), SURFACES)
async def test_a_prompt_of_a_million_ids_passes_where_the_model_takes_it(
    model: Model, read: Read, field: str
) -> None:
    ids = random.Random(1).choices(range(VOCAB_SIZE), k=MILLION)
    body = body_of(field, ids)
    tracemalloc.start()
    request = read(body, "engine")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(body), "what is only counted takes no more than its text"
    prepared = await model.prepare(request)
    assert prepared.input_tokens == MILLION and prompt_of(prepared) == ids


def test_ids_are_read_into_four_bytes_each() -> None:
    written = WrittenIds(b",".join(b"%d" % i for i in range(VOCAB_SIZE)), "prompt")
    tracemalloc.start()
    found = written.read(VOCAB_SIZE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == VOCAB_SIZE and found.itemsize == 4
    assert peak < 4 * VOCAB_SIZE + 40 * PART_BYTES


@pytest.mark.parametrize(("read", "field"), SURFACES)
async def test_more_ids_than_the_context_has_are_not_even_read(
    model: Model, read: Read, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(WrittenIds, "read", refuse)
    request = read(body_of(field, [1] * (MILLION + 17)), "engine")
    with pytest.raises(ContextTooLong) as caught:
        await model.prepare(request)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", field)
    assert f"maximum context length is {MILLION + 16} tokens" in caught.value.message
    assert f"{MILLION + 17} tokens" in caught.value.message


FAULTS = [
    (-1, "Invalid value", "token id -1 is out of vocabulary: this model has 150000"),
    (VOCAB_SIZE, "Invalid value", "token id 150000 is out of vocabulary: this model has 150000"),
    (2**40, "Invalid value", f"token id {2**40} is out of vocabulary: this model has 150000"),
    (10**60, "Invalid value", f"token id {'1' + '0' * 39} is out of vocabulary"),
    (1.5, "Invalid type", "expected an integer, but got a decimal number"),
    (1e300, "Invalid type", "expected an integer, but got a decimal number"),
    (True, "Invalid type", "expected an integer, but got a boolean"),
    (False, "Invalid type", "expected an integer, but got a boolean"),
    (None, "Invalid type", "expected an integer, but got null"),
    ("1", "Invalid type", "expected an integer, but got a string"),
    ("1, 2", "Invalid type", "expected an integer, but got a string"),
    ("x" * 200_000, "Invalid type", "expected an integer, but got a string"),
    ([1, 2], "Invalid type", "expected an integer, but got an array"),
    ({"a": 1, "b": 2}, "Invalid type", "expected an integer, but got an object"),
]


@pytest.mark.parametrize(("fault", "kind", "reason"), FAULTS)
@pytest.mark.parametrize("place", [1, 40_000])
@pytest.mark.parametrize(("read", "field"), SURFACES)
async def test_what_is_no_token_id_is_named_by_its_place(
    model: Model, read: Read, field: str, place: int, fault: Any, kind: str, reason: str
) -> None:
    ids: list[Any] = [123_456] * 50_000
    ids[place] = fault
    for written, param in (
        (ids, f"{field}[{place}]"),
        ([[5], ids], f"{field}[1][{place}]"),
    ):
        with pytest.raises(BadField) as caught:
            await model.prepare(read(body_of(field, written), "engine"))
        assert caught.value.param == param
        assert caught.value.message.startswith(f"{kind} for '{param}': ")
        assert reason in caught.value.message and len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("written", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt"),
        ([[5], []], "prompt[1]"),
        ([[5], 6], "prompt[1]"),
        ([[5], "a"], "prompt[1]"),
        (5, "prompt"),
        (True, "prompt"),
        ({}, "prompt"),
        (None, "prompt"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ([["a"]], "prompt[0][0]"),
        ([[[1]]], "prompt[0][0]"),
        ([["]"]], "prompt[0][0]"),
        ([[1]] * 129, "prompt"),
        ([[1]] * 200_000, "prompt"),
        (["a"] * 129, "prompt"),
    ],
)
async def test_what_is_no_prompt_is_named(model: Model, written: Any, param: str) -> None:
    with pytest.raises(BadField) as caught:
        await model.prepare(from_completions(body_of("prompt", written), "engine"))
    assert caught.value.param == param


def test_the_values_beside_the_ids_stay_bounded() -> None:
    body = {"model": "m", "prompt": [1] * 2 * MAX_VALUES, "stop": ["a"] * (MAX_VALUES + 1)}
    for kind in ("engine", "upstream"):
        with pytest.raises(BadField, match=f"more than {MAX_VALUES} values") as caught:
            from_completions(json.dumps(body).encode(), kind)  # type: ignore[arg-type]
        assert caught.value.param is not None and caught.value.param.startswith("stop")
    texts = {"model": "m", "input": ["a"] * (MAX_VALUES + 1)}
    with pytest.raises(BadField, match=f"more than {MAX_VALUES} values"):
        from_embeddings(json.dumps(texts).encode(), "engine")


async def test_detokenizing_is_bounded_by_the_context(model: Model) -> None:
    ids = from_detokenize(body_of("tokens", [70] * 200_000))
    assert len(await model.jobs.detokenized(ids, model.status, TURN)) == 200_000
    short = replace(model.status, max_model_len=64)
    with pytest.raises(ContextTooLong):
        await model.jobs.detokenized(ids, short, TURN)
    for written, param in (([1, -1], "tokens[1]"), ([2**40], "tokens[0]"), ("a", "tokens")):
        with pytest.raises(BadField) as caught:
            asked = from_detokenize(body_of("tokens", written))
            await model.jobs.detokenized(asked, model.status, TURN)
        assert caught.value.param == param
    nothing = from_detokenize(body_of("tokens", []))
    assert await model.jobs.detokenized(nothing, model.status, TURN) == ""


def test_an_upstream_is_sent_the_ids_as_they_are_written() -> None:
    body = b'{"model":"m","prompt":[ 1, 2,\n3 ],"user":"u"}'
    request = from_completions(body, "upstream")
    assert isinstance(request.plain, PlainForward) and request.forward is not None
    (prompt,) = request.plain.prompts
    assert isinstance(prompt, WrittenIds) and prompt.read().tolist() == [1, 2, 3]
    assert bytes(request.forward["prompt"]) == b"[ 1, 2,\n3 ]"


SPACES = st.sampled_from([b"", b" ", b"\n", b" \t\r\n"])


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=200), SPACES, st.data())
@settings(max_examples=examples(100), deadline=None)
def test_ids_are_what_was_written(ids: list[int], space: bytes, data: st.DataObject) -> None:
    written = space + (space + b"," + space).join(b"%d" % each for each in ids) + space
    body = b'{"prompt":[%b],"model":"m"}' % written
    (prompt,) = from_completions(body, "engine").completion.prompts  # type: ignore[union-attr]
    assert isinstance(prompt, WrittenIds)
    assert len(prompt) == len(ids) and prompt.read(VOCAB_SIZE).tolist() == ids
    place = data.draw(st.integers(0, len(ids) - 1))
    bad = replace(
        prompt, text=b",".join(b"-7" if i == place else b"%d" % n for i, n in enumerate(ids))
    )
    with pytest.raises(BadField) as caught:
        bad.read(VOCAB_SIZE)
    assert caught.value.param == f"prompt[{place}]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 20}, "logprobs"),
        ({"echo": True, "logprobs": 20, "prompt_logprobs": 3}, "logprobs"),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
    ],
)
async def test_more_is_told_of_a_prompt_than_an_engine_can_tell_by_the_field_that_asks(
    model: Model, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({"model": "m", "prompt": [1], **fields}).encode()
    job = (await model.prepare(from_completions(body, "engine"))).payload
    assert isinstance(job, EngineJob)
    assert job.request.sampling.prompt_logprobs == 20
    assert job.param_names.get("prompt_logprobs", "prompt_logprobs") == param


async def test_a_text_is_kept_to_its_form_whose_last_token_is_text(
    model: Model, tokenizer: Tokenizer
) -> None:
    body = b'{"model":"m","prompt":[1],"guided_choice":["a"],"stop_token_ids":[9]}'
    job = (await model.prepare(from_completions(body, "engine"))).payload
    assert isinstance(job, EngineJob) and job.reader is not None
    assert job.request.sampling.grammar == Grammar(kind="choice", text='["a"]')
    for last, text in ((*tokenizer.encode("a"), "a"), (9, "")):
        ended = EngineOutput(
            request_id="", usage=Usage(prompt_tokens=1), token_ids=[last], finish_reason="stop"
        )
        (delta,) = job.reader().read(ended).items
        assert isinstance(delta, TextDelta)
        assert (delta.text, delta.finish_reason) == (text, "stop")
