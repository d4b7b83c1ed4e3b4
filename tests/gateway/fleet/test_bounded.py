"""A bound that comes once a request was prepared: as if it had been known before, and nothing is
counted again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.fake.engine import FAKE_CONFIG, FakeCore, FakeEngine
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.model_format import ModelFormat
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import Replica
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generate_request import ChatPrompt, GenerateRequest, bounded_to, under_a_cap
from gateway.request_errors import BadField
from tests.budget import examples

Chat = Callable[..., GenerateRequest]
EXAMPLES = settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WORDS: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def ours(tokenizer: Tokenizer, template: ChatTemplate, threads: PrepareThreads) -> EngineReplica:
    engine = FakeEngine(FakeCore(FAKE_CONFIG, vocab_size=tokenizer.vocab_size))
    return EngineReplica(
        name="m@0", client=engine, tokenizer=tokenizer, template=template, threads=threads
    )


def prompt(n: int, **fields: Any) -> GenerateRequest:
    asked = ChatPrompt(messages=WORDS, **fields)
    made = GenerateRequest(model="m", stream=True, include_usage=False, n=n, prompt=asked)
    return under_a_cap(made)


async def differs(replica: Replica, asked: GenerateRequest, most: int) -> bool:
    at_once = await replica.prepare(bounded_to(asked, most))
    return replica.bounded(await replica.prepare(asked), most) != at_once


@EXAMPLES
@given(n=st.integers(1, 3), per_choice=st.integers(1, 80), beyond=st.integers(0, 2))
async def test_for_our_engine(ours: EngineReplica, n: int, per_choice: int, beyond: int) -> None:
    assert not await differs(ours, prompt(n), per_choice * n + beyond % n)


async def test_our_engine_tokenizes_once_and_refuses_what_does_not_fit(
    ours: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = await ours.prepare(prompt(2, min_tokens=5))
    monkeypatch.delattr(ModelFormat, "render")
    assert ours.bounded(prepared, 10).max_output_tokens == 10
    with pytest.raises(BadField, match="min_tokens"):
        ours.bounded(prepared, 9)


@EXAMPLES
@given(n=st.integers(1, 3), per_choice=st.integers(1, 40_000), window=st.sampled_from([None, 4096]))
async def test_for_an_upstream(
    make_replica: Callable[..., UpstreamReplica],
    chat: Chat,
    n: int,
    per_choice: int,
    window: int | None,
) -> None:
    replica = make_replica(context_window=window)
    asked = under_a_cap(chat(n=n, max_tokens=None, user="a,b"))
    assert not await differs(replica, asked, per_choice * n)


async def test_an_upstreams_input_is_measured_once(
    make_replica: Callable[..., UpstreamReplica], chat: Chat
) -> None:
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [1]

    replica = make_replica(encoding=encode)
    prepared = await replica.prepare(under_a_cap(chat()))
    bounded = replica.bounded(prepared, 7)
    assert msgspec.json.decode(bounded.payload)["max_tokens"] == bounded.max_output_tokens == 7
    assert len(texts) == 1
