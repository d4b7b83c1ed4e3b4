"""engine.transport.client over a real socket: lost and odd engines, orphans, slow consumers."""

from __future__ import annotations

import asyncio
import logging
from itertools import islice
from pathlib import Path

import msgspec
import pytest

import engine.transport.client
import engine.transport.server
from engine.errors import (
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
)
from engine.fake.engine import FakeCore, drawn
from engine.protocol import (
    ClientMessage,
    OrphanAck,
    OrphanedUsage,
    Submit,
    Usage,
)
from engine.transport.client import EngineClient
from engine.transport.frames import FrameReader, encode_frame
from tests.engine.peers import (
    LONG,
    SMALL,
    Serve,
    ask,
    collect,
    paced,
    text,
    until,
)

# ---- the client alone


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"No such file"):
        await EngineClient.connect(f"unix:{tmp_path}/none.sock", timeout_s=0.2)
    client = EngineClient(f"unix:{tmp_path}/none.sock")
    with pytest.raises(EngineUnavailable, match="not started"):
        _ = client.status


async def test_the_engine_may_come_up_later(serve: Serve, tmp_path: Path) -> None:
    client = EngineClient(f"unix:{tmp_path}/engine.sock")
    client.start()
    with pytest.raises(EngineUnavailable):
        await collect(client, ask())
    await serve(FakeCore(SMALL))
    assert (await client.wait_connected(5)).model == "fake"
    assert await collect(client, ask())
    await client.close()


async def test_a_lost_engine_fails_its_streams_and_is_found_again(serve: Serve) -> None:
    server = await serve(FakeCore(SMALL, respond=paced))
    client = await EngineClient.connect(server.address, timeout_s=30)
    first_id = client.status.engine_id
    stream = client.generate(ask(max_tokens=LONG))
    last = await anext(stream)
    closing = asyncio.create_task(server.close())
    with pytest.raises(EngineUnavailable, match="closed the connection"):
        async for last in stream:
            assert not last.finished
    assert last.usage.generated_tokens > 0  # what the consumer can bill
    assert not client.connected
    with pytest.raises(EngineUnavailable):
        await collect(client, ask("r2"))
    await client.abort("r2")
    await closing

    await serve(FakeCore(SMALL), server.address)
    assert (await client.wait_connected(5)).engine_id != first_id
    assert len(text(await collect(client, ask("r3")))) == 8
    await client.close()


@pytest.mark.parametrize("greeting", ["version", "outputs", "silence", "garbage"])
async def test_a_peer_that_is_no_engine_of_ours(
    greeting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if greeting == "silence":
        monkeypatch.setattr(engine.transport.client, "CONNECT_TIMEOUT_S", 0.1)
    status = FakeCore().status()
    first = {
        "version": encode_frame(msgspec.structs.replace(status, protocol_version=99)),
        "outputs": encode_frame(OrphanedUsage(request_id="x", usage=Usage(prompt_tokens=1))),
        "silence": b"",
        "garbage": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    }[greeting]
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await reader.read()
        writer.close()
        gone.set()

    listener = await asyncio.start_unix_server(answer, f"{tmp_path}/s")
    reason = {
        "version": "protocol 99",
        "outputs": "did not begin with its status",
        "silence": "TimeoutError",
        "garbage": "exceeds",
    }[greeting]
    client = EngineClient(f"unix:{tmp_path}/s")
    client.start()
    await until(lambda: reason in client._why_away)
    with pytest.raises(EngineUnavailable, match=reason):
        await collect(client, ask())
    await asyncio.wait_for(gone.wait(), 30)
    await client.close()
    listener.close()
    await listener.wait_closed()


async def test_an_engine_that_does_not_read_is_overloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.transport.client, "MAX_WRITE_BUFFER_BYTES", 1024)
    release = asyncio.Event()

    async def greet_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(FakeCore().status()))
        await release.wait()
        writer.close()

    listener = await asyncio.start_unix_server(greet_only, f"{tmp_path}/s", limit=1024)
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=30)
    big = ask("big", [70_000] * 2_000_000)
    stuck = asyncio.create_task(collect(client, big))
    await asyncio.sleep(0)
    with pytest.raises(EngineOverloaded, match="does not read"):
        await collect(client, ask())
    await client.close()
    with pytest.raises(EngineUnavailable):
        await stuck
    release.set()
    listener.close()
    await listener.wait_closed()


async def test_what_is_said_in_one_turn_goes_out_in_one_write(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await EngineClient.connect((await serve(FakeCore(SMALL))).address, timeout_s=30)
    assert client._writer is not None
    sizes: list[int] = []
    write = client._writer.write

    def noted(data: bytes) -> None:
        sizes.append(len(data))
        write(data)

    monkeypatch.setattr(client._writer, "write", noted)
    asked = [ask(f"r{number}") for number in range(4)]
    answers = await asyncio.gather(*(collect(client, each) for each in asked))
    assert [len(text(each)) for each in answers] == [8] * 4
    assert sizes == [sum(len(encode_frame(Submit(each))) for each in asked)]
    for each in asked:
        await client.acknowledge(each.request_id)
    assert len(sizes) == 1
    await client.close()
    acks = sum(len(encode_frame(OrphanAck([each.request_id]))) for each in asked)
    assert sizes[1:] == [acks], "what was said is sent before it leaves"


async def test_a_prompt_too_large_for_a_frame_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await EngineClient.connect((await serve(FakeCore(SMALL))).address, timeout_s=30)
    monkeypatch.setattr("engine.transport.frames.MAX_FRAME_BYTES", 6000)
    with pytest.raises(InvalidRequest) as refused:
        await collect(client, ask(prompt=[1000] * 3000))
    assert refused.value.param == "prompt_token_ids"
    assert await collect(client, ask())
    await client.close()


# ---- orphans


async def leave_an_orphan(address: str, request_id: str) -> Usage:
    """Connect, generate a little and vanish; what was seen last."""
    client = await EngineClient.connect(address, timeout_s=30)
    output = await anext(stream := client.generate(ask(request_id, max_tokens=LONG)))
    await client.close()
    with pytest.raises(EngineUnavailable):
        async for later in stream:
            output = later
    return output.usage


async def test_orphaned_usage_is_offered_until_it_is_acked(serve: Serve) -> None:
    address = (await serve(FakeCore(SMALL, respond=paced))).address
    seen = await leave_an_orphan(address, "lost")
    offered: list[OrphanedUsage] = []

    async def refuse(orphan: OrphanedUsage) -> None:
        offered.append(orphan)
        raise OSError("disk full")

    async def decline(orphan: OrphanedUsage) -> bool:
        offered.append(orphan)
        return False

    async def accept(orphan: OrphanedUsage) -> None:
        offered.append(orphan)

    for number, on_orphan in enumerate([None, refuse, decline, accept], start=0):
        client = await EngineClient.connect(address, timeout_s=30, on_orphan=on_orphan)
        await until(lambda number=number: len(offered) == number)  # type: ignore[misc]
        assert await collect(client, ask(f"after-{number}"))  # an ack has arrived by now
        await client.acknowledge(f"after-{number}")
        await client.close()
    assert {o.request_id for o in offered} == {"lost"}
    usage = offered[0].usage
    assert usage.prefilled and usage.prompt_tokens == 3
    assert seen.generated_tokens <= usage.generated_tokens < LONG
    client = await EngineClient.connect(address, timeout_s=30, on_orphan=accept)
    assert await collect(client, ask("last"))
    assert len(offered) == 3
    await client.close()


async def test_only_a_request_whose_end_was_taken_is_acknowledged(serve: Serve) -> None:
    server = await serve(FakeCore(SMALL, respond=paced))
    offered: list[OrphanedUsage] = []

    async def accept(orphan: OrphanedUsage) -> None:
        offered.append(orphan)

    stays = await EngineClient.connect(server.address, timeout_s=30, on_orphan=accept)
    client = await EngineClient.connect(server.address, timeout_s=30)
    await collect(client, ask("acknowledged"))
    last = (await collect(client, ask("delivered")))[-1]
    await anext(left := client.generate(ask("left", max_tokens=LONG)))
    await left.aclose()
    for request_id in ("acknowledged", "left", "unknown"):
        await client.acknowledge(request_id)
    await until(lambda: stays.status.num_running == 0)
    await client.close()
    await client.acknowledge("delivered")  # too late, and no error
    await until(lambda: len(offered) == 2)
    by_id = {orphan.request_id: orphan.usage for orphan in offered}
    assert by_id.keys() == {"delivered", "left"}
    assert by_id["delivered"] == last.usage
    await stays.close()


async def test_a_gateway_that_stays_is_offered_the_orphans_of_one_that_leaves(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.transport.server, "REOFFER_S", 0.05)
    address = (await serve(FakeCore(SMALL, respond=paced))).address
    offers = 0

    async def at_the_third_time(orphan: OrphanedUsage) -> None:
        nonlocal offers
        offers += 1
        if offers < 3:
            raise RuntimeError("not yet")

    stays = await EngineClient.connect(address, timeout_s=30, on_orphan=at_the_third_time)
    with caplog.at_level(logging.ERROR):
        await leave_an_orphan(address, "lost")
        await until(lambda: offers == 3)
    assert "the orphaned usage of lost was not recorded" in caplog.text
    await asyncio.sleep(0.2)
    assert offers == 3
    await stays.close()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_leaves_is_heard_to_the_end(
    reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last acknowledgement arrives although the engine writes to it meanwhile; an engine that
    hangs holds it up for a moment alone."""
    monkeypatch.setattr(engine.transport.client, "FAREWELL_S", 60.0 if reads else 0.1)
    status = encode_frame(FakeCore().status())
    heard: list[ClientMessage | None] = []
    leaving, gone = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        usage = Usage(prompt_tokens=1)
        writer.write(status + encode_frame(OrphanedUsage(request_id="x", usage=usage)))
        await leaving.wait()
        frames: FrameReader[ClientMessage] = FrameReader(reader, ClientMessage)
        while reads and None not in heard:
            writer.write(1_000 * status)
            heard.append(await frames.read())
        if not reads:
            await gone.wait()
        writer.close()

    async def record(_: OrphanedUsage) -> None:
        leaving.set()

    listener = await asyncio.start_unix_server(answer, f"{tmp_path}/s")
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=30, on_orphan=record)
    await until(leaving.is_set)
    await asyncio.sleep(0)  # the record is made; now it is acknowledged
    await asyncio.wait_for(client.close(), 30)
    gone.set()
    assert not client.connected
    await until(lambda: heard == ([OrphanAck(["x"]), None] if reads else []))
    listener.close()
    await listener.wait_closed()


async def test_nothing_is_said_by_a_client_that_leaves(serve: Serve) -> None:
    """Not even of a request whose consumer goes meanwhile: the engine aborts it by itself."""
    server = await serve(FakeCore(SMALL, respond=paced))
    client = await EngineClient.connect(server.address, timeout_s=30)
    stream = client.generate(ask(max_tokens=LONG))
    await anext(stream)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)  # it has hung up
    with pytest.raises(EngineUnavailable, match="the client was closed"):
        await collect(client, ask("r2"))
    await client.abort("r")
    await stream.aclose()
    await asyncio.wait_for(closing, 60)
    async with asyncio.timeout(60):
        other = await EngineClient.connect(server.address, timeout_s=30)
        await until(lambda: other.status.num_running == 0)
        await other.close()


# ---- merging


async def test_a_slow_consumer_gets_everything_in_few_outputs(serve: Serve) -> None:
    client = await EngineClient.connect((await serve(FakeCore(SMALL))).address, timeout_s=30)
    request = ask(n=2, max_tokens=200, logprobs=1)
    stream = client.generate(request)
    outputs = [await anext(stream)]
    await until(lambda: client.status.generated_tokens == 400)  # over, and nobody has read
    outputs += [output async for output in stream]
    assert len(outputs) <= 1 + 1 + 2  # the first, perhaps the rest of its frame, two merged ones
    for index in range(2):
        assert text(outputs, index) == list(islice(drawn(request, index), 200))
    for output in outputs:
        assert output.logprobs is not None
        assert [entry.chosen.token_id for entry in output.logprobs] == output.token_ids
    assert outputs[-1].finished and outputs[-1].usage.generated_tokens == 400
    await client.close()
