"""engine.transport.server on real sockets: whose requests are whose, who is dropped, what is never
lost.
"""

from __future__ import annotations

import logging
import socket
import struct
from itertools import islice

import msgspec
import pytest

import engine.transport.server
import engine.transport.step_loop
from engine.fake.engine import FakeCore, drawn
from engine.protocol import (
    Abort,
    OrphanAck,
    OrphanedUsage,
    Outputs,
    Rejection,
    Submit,
    Usage,
)
from engine.transport.frames import encode_frame
from engine.transport.server import EngineServer
from tests.engine.peers import (
    CONFIG,
    GatedCore,
    Join,
    Serve,
    settle,
    submit,
    until,
)

# ---- requests and their connections


async def test_a_request_from_submit_to_idle(join: Join, serve: Serve) -> None:
    peer = await join(await serve(FakeCore(CONFIG)))
    await peer.until_status(lambda status: status.model == "fake")
    message = submit("a", max_tokens=5)
    peer.say(message)
    last = await peer.last_of("a")
    frames = [m for m in peer.heard if isinstance(m, Outputs)]
    ids = [id_ for frame in frames for output in frame.outputs for id_ in output.token_ids]
    assert ids == list(islice(drawn(message.request, 0), 5))
    assert last.usage == Usage(prompt_tokens=3, generated_tokens=5, prefilled=True)
    await peer.until_status(lambda s: s.num_running == 0 and s.generated_tokens == 5)
    assert peer.status is not None
    assert peer.status.num_free_blocks == peer.status.num_blocks


async def test_one_frame_per_step_and_connection(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    one, two = await join(server), await join(server)
    one.say(submit("a", n=3))
    await until(lambda: core.entered == 1)
    two.say(submit("b"))
    await settle()
    core.allow(1)
    first = await one.next()
    assert isinstance(first, Outputs)
    assert [(o.request_id, o.index) for o in first.outputs] == [("a", 0), ("a", 1), ("a", 2)]
    core.allow(4)
    assert (await one.last_of("a")).usage.generated_tokens == 12
    assert (await two.last_of("b")).usage.generated_tokens == 4
    assert len([m for m in one.heard if isinstance(m, Outputs)]) == 4
    for message in two.heard:
        assert isinstance(message, Outputs)
        assert {o.request_id for o in message.outputs} == {"b"}


async def test_refusals_name_code_and_field(
    join: Join, gated: tuple[GatedCore, EngineServer]
) -> None:
    core, server = gated
    peer = await join(server)
    peer.say(submit("blocks"))
    await until(lambda: core.entered == 1)
    # All of these wait for the step in progress, and are refused before the next one.
    peer.say(
        submit("empty", prompt=[]),
        submit("long", prompt=[1] * 4096),
        submit("w1"),
        submit("w2"),
        submit("w3"),
    )
    await settle()
    core.allow(1)
    refused: list[tuple[str, str, str | None]] = []
    while len(refused) < 3:
        if isinstance(message := await peer.next(), Rejection):
            refused.append((message.request_id, message.code, message.param))
    assert refused == [
        ("empty", "invalid_request", "prompt_token_ids"),
        ("long", "context_length_exceeded", "prompt_token_ids"),
        ("w3", "engine_overloaded", None),
    ]
    core.allow(20)
    for request_id in ("w1", "w2"):
        await peer.last_of(request_id)


async def test_an_id_in_use_is_refused_whoever_asks(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    one, two = await join(server), await join(server)
    one.say(submit("a"))
    await until(lambda: core.entered == 1)
    for peer in (one, two):
        peer.say(submit("a"))
        message = await peer.next()
        assert isinstance(message, Rejection)
        assert (message.code, message.param) == ("invalid_request", "request_id")
    core.allow(10)
    await one.last_of("a")
    one.say(submit("a"))
    await one.last_of("a")


async def test_too_many_commands_during_a_step_are_overload(
    join: Join, gated: tuple[GatedCore, EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, server = gated
    for queue in server._step_loop._submits.values():
        monkeypatch.setattr(queue, "most", 1)
    peer = await join(server)
    peer.say(submit("a"))
    await until(lambda: core.entered == 1)
    lower = msgspec.structs.replace(submit("d").request, lane="batch")
    peer.say(submit("b"), submit("c"), Submit(lower))
    message = await peer.next()
    assert isinstance(message, Rejection)
    assert (message.request_id, message.code) == ("c", "engine_overloaded")
    assert "lane interactive" in message.message
    core.allow(10)
    await peer.last_of("b")
    await peer.last_of("d")


async def test_abort_frees_within_one_step(
    join: Join, gated: tuple[GatedCore, EngineServer]
) -> None:
    core, server = gated
    peer, stranger = await join(server), await join(server)
    peer.say(submit("a", max_tokens=1000), submit("b", max_tokens=1000))
    core.allow(3)
    await until(lambda: core.entered == 4)
    stranger.say(Abort("a"))  # not its own
    peer.say(Abort("b"), Abort("b"), Abort("unknown"))
    await settle()
    core.allow(1)
    last = await peer.last_of("b")
    assert last.finish_reason == "abort"
    assert last.usage.generated_tokens in (3, 4)  # `b` may have missed the first step
    await until(lambda: core.entered == 5)
    assert core.status().num_running == 1  # the step after the abort runs without it
    core.allow(1000)
    assert (await peer.last_of("a")).finish_reason == "length"


async def test_abort_of_what_never_ran_bills_nothing(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    peer = await join(server)
    peer.say(submit("a"))
    await until(lambda: core.entered == 1)
    peer.say(submit("b"), Abort("b"))
    await settle()
    core.allow(10)
    last = await peer.last_of("b")
    assert last.finish_reason == "abort" and not last.usage.prefilled


# ---- lost connections


async def test_a_lost_connection_aborts_its_requests_and_leaves_orphans(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    lost, stays = await join(server), await join(server)
    lost.say(submit("a", max_tokens=1000), submit("b", max_tokens=1000))
    lost.say(submit("waits", max_tokens=1000))  # max_num_seqs is 2
    core.allow(5)
    await until(lambda: core.entered == 6)
    lost.vanish()
    await settle()
    core.allow(1)
    orphans = [await stays.next(), await stays.next()]
    assert {o.request_id for o in orphans if isinstance(o, OrphanedUsage)} == {"a", "b"}
    for orphan in orphans:
        assert isinstance(orphan, OrphanedUsage)
        assert orphan.usage.prefilled and 4 <= orphan.usage.generated_tokens <= 6
    await stays.until_status(lambda s: s.num_running == s.num_waiting == 0)
    assert stays.status is not None and stays.status.kv_cache_usage == 0

    late = await join(server)
    assert {o.request_id for o in (await late.next(), await late.next())} == {"a", "b"}  # type: ignore[union-attr]
    late.say(submit("a"))  # billed under this id already
    assert isinstance(await late.next(), Rejection)
    late.say(OrphanAck(["a", "never heard of"]))
    core.allow(10)
    late.say(submit("c"))
    await late.last_of("c")
    later = await join(server)
    message = await later.next()
    assert isinstance(message, OrphanedUsage) and message.request_id == "b"


async def test_a_request_that_ends_while_its_loss_is_unknown_to_the_core_is_an_orphan(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    lost, stays = await join(server), await join(server)
    lost.say(submit("a", max_tokens=1))
    await until(lambda: core.entered == 1)
    lost.vanish()
    await settle()
    core.allow(1)  # the step in progress finishes it; the abort comes too late
    message = await stays.next()
    assert isinstance(message, OrphanedUsage)
    assert message.usage.generated_tokens == 1


async def test_a_finished_request_is_an_orphan_until_its_gateway_acks(
    join: Join, serve: Serve
) -> None:
    server = await serve(FakeCore(CONFIG))
    lost, stays = await join(server), await join(server)
    for request_id in ("acked", "delivered"):
        lost.say(submit(request_id))
        last = await lost.last_of(request_id)
    lost.say(OrphanAck(["acked", "never heard of"]))
    stays.say(OrphanAck(["delivered"]))  # not its own
    await settle()
    lost.vanish()
    orphan = await stays.next()
    assert orphan == OrphanedUsage(request_id="delivered", usage=last.usage)
    late = await join(server)
    assert await late.next() == orphan
    late.say(OrphanAck(["delivered"]), submit("next"))
    await late.last_of("next")
    later = await join(server)
    later.say(submit("last"))
    await later.last_of("last")
    assert not any(isinstance(message, OrphanedUsage) for message in later.heard)


async def test_usage_that_never_is_acked_is_bounded_and_none_is_lost(
    join: Join, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve(FakeCore(CONFIG))  # max_orphans is 3
    forgetful = await join(server)
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            forgetful.say(submit(f"r{number}"))
            await forgetful.last_of(f"r{number}")
    assert "gateway-1 acks too little" in caplog.text
    orphans = [m.request_id for m in forgetful.heard if isinstance(m, OrphanedUsage)]
    assert orphans == ["r0"]


async def test_the_oldest_orphan_goes_with_a_word(
    join: Join, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    core = GatedCore(max_num_seqs=8, max_waiting=8)
    server = await serve(core)
    lost = await join(server)
    lost.say(*(submit(f"r{i}", max_tokens=1000) for i in range(5)))
    core.allow(2)
    await until(lambda: core.entered == 3)
    lost.vanish()
    await settle()
    with caplog.at_level(logging.ERROR):
        core.allow(1)
        await until(lambda: "orphaned usage of r1 dropped" in caplog.text)
    assert "orphaned usage of r0 dropped" in caplog.text
    peer = await join(server)
    orphans = [await peer.next() for _ in range(3)]
    assert [o.request_id for o in orphans if isinstance(o, OrphanedUsage)] == ["r2", "r3", "r4"]


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack(">I", 2**31),
        struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1",
        encode_frame(Outputs([])),  # well formed, but not a gateway's to say
        encode_frame(Abort("a"))[:-1],
    ],
    ids=["too large", "no msgpack", "wrong direction", "truncated"],
)
async def test_a_malformed_frame_ends_that_connection_alone(
    join: Join, serve: Serve, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve(FakeCore(CONFIG))
    good, bad = await join(server), await join(server)
    with caplog.at_level(logging.WARNING):
        bad.writer.write(garbage)
        bad.writer.write_eof()
        assert await bad.next() is None
        good.say(submit("a"))
        await good.last_of("a")
    assert "gateway-2 dropped: " in caplog.text


async def test_a_peer_that_does_not_read_is_dropped_and_stalls_nobody(
    join: Join, serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.transport.server, "MAX_WRITE_BUFFER_BYTES", 2_000_000)
    server = await serve(FakeCore(CONFIG))
    good = await join(server)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bad:
        bad.connect(server.address.removeprefix("unix:"))
        with caplog.at_level(logging.WARNING):
            bad.sendall(encode_frame(submit("slow", max_tokens=4000, n=8, logprobs=20)))
            good.say(submit("a", max_tokens=2000))
            assert (await good.last_of("a")).usage.generated_tokens == 2000
            while not (orphans := [m for m in good.heard if isinstance(m, OrphanedUsage)]):
                await good.next()
    assert "gateway-2 does not read" in caplog.text
    orphan = orphans[0]
    assert orphan.request_id == "slow"
    assert orphan.usage.generated_tokens < 8 * 4000
    await good.until_status(lambda s: s.num_running == 0)


async def test_connections_are_bounded(
    join: Join, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.transport.server, "MAX_CONNECTIONS", 1)
    server = await serve(FakeCore(CONFIG))
    first = await join(server)
    second = await join(server)
    assert await second.next() is None
    first.say(submit("a"))
    await first.last_of("a")
    first.vanish()
    await until(lambda: not server._connections)
    third = await join(server)
    third.say(submit("b"))
    await third.last_of("b")
