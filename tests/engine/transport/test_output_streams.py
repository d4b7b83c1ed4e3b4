"""Outputs on their way to their consumers: merged, taken where they are waited for, held."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineUnavailable
from engine.protocol import EngineOutput, TokenLogprob, TokenLogprobs, Usage
from engine.transport.output_streams import (
    MAX_COPIED_TOKENS,
    Acceptance,
    OutputStream,
    OutputStreams,
)
from tests.engine.peers import text

INTERVAL_S = 0.01


@given(data=st.data())
def test_merging_loses_and_reorders_nothing(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3), "n")
    steps = data.draw(st.lists(st.sampled_from([*range(n), "take"]), max_size=60), "steps")

    async def check() -> None:
        stream = OutputStream()
        pushed: dict[int, list[int]] = {index: [] for index in range(n)}
        taken: list[EngineOutput] = []
        generated = 0
        for step in [*steps, *range(n)]:
            if isinstance(step, int):
                generated += 1
                pushed[step].append(generated)
                usage = Usage(prompt_tokens=1, generated_tokens=generated)
                stream.push(
                    EngineOutput(request_id="r", usage=usage, index=step, token_ids=[generated])
                )
            elif len(taken) < generated and stream._pending:
                taken.append(await stream.next())
            assert len(stream._pending) <= n
        usage = Usage(prompt_tokens=1, generated_tokens=generated)
        stream.push(EngineOutput(request_id="r", usage=usage, finish_reason="abort", finished=True))
        while not stream.finished:
            taken.append(await stream.next())
        for index in range(n):
            assert text(taken, index) == pushed[index]
        counts = [output.usage.generated_tokens for output in taken]
        assert counts == sorted(counts) and counts[-1] == generated
        assert [output.finished for output in taken] == [False] * (len(taken) - 1) + [True]
        assert taken[-1].finish_reason == "abort"

    asyncio.run(check())


async def test_what_is_pending_comes_before_the_error() -> None:
    stream = OutputStream()
    stream.push(EngineOutput(request_id="r", usage=Usage(prompt_tokens=1), token_ids=[4]))
    stream.fail(EngineUnavailable("gone"))
    assert (await stream.next()).token_ids == [4]
    with pytest.raises(EngineUnavailable):
        await stream.next()


def spoken(token_id: int, request_id: str = "r", **fields: Any) -> EngineOutput:
    usage = Usage(prompt_tokens=1)
    return EngineOutput(request_id=request_id, usage=usage, token_ids=[token_id], **fields)


async def test_what_is_taken_while_it_is_waited_for_is_not_yielded() -> None:
    offered: list[int] = []
    answers: dict[int, Acceptance] = {1: "taken", 2: "left", 4: "enough"}

    def take(output: EngineOutput) -> Acceptance:
        offered.extend(output.token_ids)
        return answers[output.token_ids[0]]

    stream = OutputStream(take)
    assert not stream.push(spoken(0)), "nobody waits yet"
    assert (await stream.next()).token_ids == [0] and offered == []
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert [stream.push(spoken(each)) for each in (1, 2, 3)] == [False] * 3
    assert (await waiting).token_ids == [2, 3] and offered == [1, 2], "behind what was left"
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert stream.push(spoken(4)), "its request wants no more"
    stream.fail(EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable):
        await waiting


async def test_who_fails_to_take_an_output_hears_of_it_where_it_waits() -> None:
    def take(output: EngineOutput) -> Acceptance:
        raise ValueError("a bug of the consumer")

    stream = OutputStream(take)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert not stream.push(spoken(1))
    with pytest.raises(ValueError, match="a bug"):
        await waiting
    assert not stream.ended, "the engine still has to be told"


async def test_an_output_is_taken_in_the_context_of_its_consumer() -> None:
    name: ContextVar[str] = ContextVar("name", default="the client's")
    seen: list[str] = []

    def take(output: EngineOutput) -> Acceptance:
        seen.append(name.get())
        return "taken"

    async def consume() -> None:
        name.set("the consumer's")
        await streams.setdefault("r", OutputStream(take)).next()

    streams: dict[str, OutputStream] = {}
    waiting = asyncio.create_task(consume())
    await asyncio.sleep(0)
    streams["r"].push(spoken(1))
    assert seen == ["the consumer's"]
    waiting.cancel()


async def test_long_merges_keep_every_token_and_logprob() -> None:
    scored = [TokenLogprobs(TokenLogprob(7, -0.5), [])]
    for logprobs in (None, scored):
        stream, most = OutputStream(), 2 * MAX_COPIED_TOKENS + 3
        for each in range(most):
            stream.push(spoken(each, logprobs=None if logprobs is None else [*logprobs]))
        merged = await stream.next()
        assert merged.token_ids == [*range(most)]
        assert merged.logprobs == (None if logprobs is None else logprobs * most)


class HeldStreams(OutputStreams):
    """Streams whose time a test owns."""

    def __init__(self) -> None:
        self.now, self.enough = 100.0, list[str]()
        super().__init__(INTERVAL_S, on_enough=self.enough.append, few=0, clock=lambda: self.now)

    async def rest(self) -> None:
        """Let the timer fire that was set: it is due before this sleep is over."""
        self.now += INTERVAL_S
        await asyncio.sleep(2 * INTERVAL_S)


async def test_what_comes_soon_after_another_output_goes_on_with_the_next() -> None:
    taken: list[list[int]] = []

    def take(output: EngineOutput) -> Acceptance:
        taken.append(output.token_ids)
        return "left" if output.finish_reason else "taken"

    streams = HeldStreams()
    stream = streams.open("r", take)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    streams.push([spoken(0)])
    assert taken == [[0]], "what is due waits for nothing"
    streams.push([spoken(1)])
    streams.push([spoken(2)])
    assert taken == [[0]]
    streams.now += INTERVAL_S
    streams.push([spoken(3)])
    assert taken == [[0], [1, 2, 3]]
    streams.push([spoken(4)])
    await streams.rest()
    assert taken == [[0], [1, 2, 3], [4]], "no other step came"
    streams.push([spoken(5)])
    streams.push([spoken(6, finish_reason="stop", finished=True)])
    assert (await waiting).token_ids == [5, 6] and stream.finished, "an end waits for nothing"


async def test_the_first_output_of_a_request_is_not_held() -> None:
    streams, told = HeldStreams(), list[str]()
    for name in ("r", "s"):
        streams.open(name, lambda output: told.append(output.request_id) or "taken")
    waiting = [asyncio.create_task(streams[name].next()) for name in ("r", "s")]
    await asyncio.sleep(0)
    streams.push([spoken(0)])
    streams.push([spoken(1), spoken(2, request_id="s"), spoken(3, request_id="gone")])
    assert told == ["r", "s"]
    streams.close("r")
    await streams.rest()
    assert told == ["r", "s"], "nobody waits for it any more"
    for each in waiting:
        each.cancel()


async def test_outputs_of_few_streams_are_not_held() -> None:
    streams = OutputStreams(60.0, on_enough=lambda _: None, few=2)
    told: dict[str, int] = {}
    names = ["r", "s", "t"]
    for name in names:

        def take(output: EngineOutput) -> Acceptance:
            told[output.request_id] = told.get(output.request_id, 0) + len(output.token_ids)
            return "taken"

        streams.open(name, take)
    waiting = [asyncio.create_task(streams[name].next()) for name in names]
    await asyncio.sleep(0)
    for _ in range(2):
        streams.push([spoken(0, request_id=name) for name in names])
    assert told == {"r": 1, "s": 1, "t": 1}
    streams.push([spoken(0, request_id=name) for name in names[:2]])
    assert told == {"r": 3, "s": 3, "t": 2}, "what was held goes on with them"
    for each in waiting:
        each.cancel()


async def test_who_wants_each_output_at_once_gets_it() -> None:
    streams, told = HeldStreams(), list[int]()
    streams.open("r", lambda output: told.extend(output.token_ids) or "taken", at_once=True)
    waiting = asyncio.create_task(streams["r"].next())
    await asyncio.sleep(0)
    for each in range(3):
        streams.push([spoken(each)])
    assert told == [0, 1, 2]
    waiting.cancel()


async def test_what_is_held_comes_before_an_error_and_tells_who_wants_no_more() -> None:
    streams = HeldStreams()
    first = streams.open("r")
    second = streams.open("s", lambda output: "enough" if output.token_ids == [2] else "taken")
    waiting = asyncio.create_task(second.next())
    await asyncio.sleep(0)
    streams.push([spoken(0), spoken(0, request_id="s")])
    assert (await first.next()).token_ids == [0]
    streams.push([spoken(1), spoken(2, request_id="s")])
    assert streams.enough == []
    await streams.rest()
    assert streams.enough == ["s"]
    streams.push([spoken(2)])
    streams.fail(lambda: EngineUnavailable("gone"))
    assert (await first.next()).token_ids == [1, 2]
    for each in (first.next(), waiting):
        with pytest.raises(EngineUnavailable):
            await each
