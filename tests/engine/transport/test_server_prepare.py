"""A grammar that takes its time to compile holds up nobody but its own request, and whatever
happens to that request meanwhile is answered as at any other time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine.errors import InvalidRequest
from engine.protocol import Abort, EngineOutput, EngineRequest, Grammar, Outputs, Rejection, Submit
from engine.transport.server import EngineServer
from tests.engine.peers import GatedCore, Join, Serve, settle, submit, until

GRAMMAR = Grammar(kind="regex", text="a+")
WRONG = Grammar(kind="regex", text="(a")
BUG = Grammar(kind="lark", text="")


class CompilingCore(GatedCore):
    """Compiles when told to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.compiling: list[str] = []
        self.compiled = threading.Semaphore(0)
        self.arrived: list[str] = []
        self.aborted: list[str] = []

    def prepare(self, request: EngineRequest) -> None:
        grammar = request.sampling.grammar
        if grammar is None or request.request_id in self.compiling:
            return
        self.compiling.append(request.request_id)
        assert self.compiled.acquire(timeout=30), "nobody let it be compiled"
        assert grammar != BUG, "a bug"
        if grammar == WRONG:
            raise InvalidRequest("grammar: unclosed", param="grammar")

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.arrived.append(request.request_id)

    def abort(self, request_id: str) -> list[EngineOutput]:
        self.aborted.append(request_id)
        return super().abort(request_id)


@pytest_asyncio.fixture
async def compiling(serve: Serve) -> AsyncIterator[tuple[CompilingCore, EngineServer]]:
    core = CompilingCore()
    server = await serve(core)
    yield core, server
    core.compiled.release(100)
    core.allow(10_000)


async def test_others_are_served_meanwhile(
    join: Join, compiling: tuple[CompilingCore, EngineServer]
) -> None:
    core, server = compiling
    core.allow(100)
    peer = await join(server)
    peer.say(submit("slow", grammar=GRAMMAR), submit("other"))
    assert (await peer.last_of("other")).finish_reason == "length"
    assert core.compiling == ["slow"] and core.arrived == ["other"]
    peer.say(submit("slow"))
    message = await peer.next()
    assert isinstance(message, Rejection) and message.param == "request_id"
    core.compiled.release()
    assert (await peer.last_of("slow")).usage.generated_tokens == 4


async def test_a_refusal_names_the_grammar(
    join: Join, compiling: tuple[CompilingCore, EngineServer]
) -> None:
    core, server = compiling
    core.allow(100)
    peer = await join(server)
    core.compiled.release(2)
    peer.say(submit("r", grammar=WRONG))
    message = await peer.next()
    assert isinstance(message, Rejection)
    assert (message.request_id, message.code, message.param) == ("r", "invalid_request", "grammar")
    core.compiling.clear()
    peer.say(submit("r", grammar=GRAMMAR))  # the id is free again
    await peer.last_of("r")


async def test_an_abort_meanwhile_is_answered(
    join: Join, compiling: tuple[CompilingCore, EngineServer]
) -> None:
    core, server = compiling
    peer = await join(server)
    peer.say(submit("r", n=2, grammar=GRAMMAR), Abort("r"))
    await until(lambda: core.compiling == ["r"])
    await settle()
    core.compiled.release()
    message = await peer.next()
    assert isinstance(message, Outputs)
    assert [(o.index, o.finish_reason) for o in message.outputs] == [(0, "abort"), (1, "abort")]
    assert core.entered == 0 and not core.has_work()


async def test_a_gateway_that_left_meanwhile_leaves_nothing(
    join: Join, compiling: tuple[CompilingCore, EngineServer]
) -> None:
    core, server = compiling
    gone = await join(server)
    gone.say(submit("run", grammar=GRAMMAR), submit("wrong", grammar=WRONG))
    await until(lambda: core.compiling == ["run"])
    await settle()
    gone.vanish()
    await until(lambda: not server._connections)
    core.compiled.release(2)
    await until(lambda: not server._live)
    assert core.arrived == ["run"] and core.entered == 0 and not core.has_work()


async def test_a_drain_waits_for_what_is_compiled(
    join: Join, compiling: tuple[CompilingCore, EngineServer]
) -> None:
    core, server = compiling
    core.allow(100)
    peer = await join(server)
    peer.say(submit("r", grammar=GRAMMAR))
    await until(lambda: core.compiling == ["r"])
    draining = asyncio.create_task(server.drain(10))
    await settle()
    assert not draining.done()
    core.compiled.release()
    assert (await peer.last_of("r")).finish_reason == "length"
    await draining


async def test_no_more_than_so_many_wait(
    join: Join, compiling: tuple[CompilingCore, EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, server = compiling
    for queue in server._preparing_of.values():
        monkeypatch.setattr(queue, "most", 2)
    core.allow(100)
    peer = await join(server)
    lower = msgspec.structs.replace(submit("d", grammar=GRAMMAR).request, lane="batch")
    peer.say(*(submit(name, grammar=GRAMMAR) for name in "abc"), Submit(lower))
    message = await peer.next()
    assert isinstance(message, Rejection)
    assert (message.request_id, message.code) == ("c", "engine_overloaded")
    core.compiled.release(3)
    await until(lambda: not server._live)
    assert core.arrived == ["a", "b", "d"]


async def test_what_was_prepared_for_a_full_engine_is_let_go(
    join: Join, compiling: tuple[CompilingCore, EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, server = compiling
    monkeypatch.setattr(server._step_loop._submits["interactive"], "most", 0)
    peer = await join(server)
    core.compiled.release()
    peer.say(submit("r", grammar=GRAMMAR))
    message = await peer.next()
    assert isinstance(message, Rejection)
    assert (message.request_id, message.code) == ("r", "engine_overloaded")
    await until(lambda: core.aborted == ["r"])
    assert core.arrived == [] and not server._live


async def test_a_bug_there_ends_the_process(
    join: Join, compiling: tuple[CompilingCore, EngineServer]
) -> None:
    core, server = compiling
    peer = await join(server)
    core.compiled.release()
    peer.say(submit("r", grammar=BUG))
    await until(lambda: server._failed.done())
    assert isinstance(server._failed.exception(), AssertionError)


async def test_an_engine_that_closes_waits_for_no_compilation(serve: Serve, join: Join) -> None:
    core = CompilingCore()
    server = await serve(core)
    peer = await join(server)
    peer.say(submit("one", grammar=GRAMMAR), submit("two", grammar=GRAMMAR))
    await until(lambda: core.compiling == ["one"])
    async with asyncio.timeout(30):
        await server.close()
    assert core.arrived == []
    core.compiled.release(2)
