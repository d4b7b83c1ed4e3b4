"""Engines that join over TLS: they serve like local ones, come back by themselves, and leave."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from engine.errors import EngineUnavailable
from engine.transport.client import EngineClient
from gateway.fleet.joining.admission import JoinPlace
from tests.gateway.fleet.joining.home_of_engines import (
    WAIT_S,
    JoinableHome,
    generate,
    request,
    rest_of,
    until,
)
from tests.scratch import scratch_for_a_while


@pytest_asyncio.fixture
async def home() -> AsyncIterator[JoinableHome]:
    with scratch_for_a_while() as folder:
        made = JoinableHome(Path(folder) / "home")
        await made.begin()
        yield made
        await made.close()


@pytest_asyncio.fixture
async def client(home: JoinableHome) -> AsyncIterator[EngineClient]:
    """Yield the client that a gateway process has of the engine's place."""
    made = EngineClient(home.addresses[0])
    made.start()
    yield made
    await made.close()


async def test_an_engine_that_joined_serves_every_process_and_keeps_its_certificate(
    home: JoinableHome, client: EngineClient
) -> None:
    engine = home.engine()
    await engine.begin()
    assert (await client.wait_connected(WAIT_S)).model == "penny"
    other = await EngineClient.connect(home.addresses[0], timeout_s=WAIT_S)
    one, two = await asyncio.gather(generate(client), generate(other))
    assert one == two and len(one) == 3
    await other.close()
    assert home.relay is not None
    assert [record.replica for record in home.relay.joined.values()] == ["penny/0"]
    identity = engine.folder / "identity"
    assert stat.S_IMODE(identity.stat().st_mode) == 0o600
    (engine.folder / "token").unlink()
    await engine.vanish()
    await until(lambda: not client.connected)
    await engine.begin()
    await client.wait_connected(WAIT_S)
    assert len(await generate(client)) == 3


async def test_a_stream_ends_with_its_engine_and_the_place_with_it(
    home: JoinableHome, client: EngineClient
) -> None:
    engine = home.engine()
    await engine.begin()
    await client.wait_connected(WAIT_S)
    stream = client.generate(request(4000))
    await anext(stream)
    await engine.vanish()
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            pass
    await until(lambda: not Path(home.addresses[0].removeprefix("unix:")).exists())
    assert home.relay is not None and home.relay.joined == {}


async def test_a_relay_that_dies_takes_streams_along_and_engines_come_back_by_themselves(
    home: JoinableHome, client: EngineClient
) -> None:
    engine = home.engine()
    await engine.begin()
    await client.wait_connected(WAIT_S)
    stream = client.generate(request(4000))
    await anext(stream)
    await home.end()
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            pass
    await home.begin()
    await client.wait_connected(WAIT_S)
    assert len(await generate(client)) == 3


async def test_a_drain_ends_what_runs_and_lets_nothing_new_come(
    home: JoinableHome, client: EngineClient
) -> None:
    engine = home.engine()
    await engine.begin()
    await client.wait_connected(WAIT_S)
    stream = client.generate(request(500))
    first = await anext(stream)
    engine.stop.set()
    await until(lambda: not Path(home.addresses[0].removeprefix("unix:")).exists())
    assert len(first.token_ids) + len(await rest_of(stream)) == 500
    await client.acknowledge(first.request_id)
    await engine.end()


async def test_its_file_is_there_while_it_is_joined(
    client: EngineClient, home: JoinableHome
) -> None:
    engine = home.engine()
    assert not engine.joined_file.exists()
    await engine.begin()
    await client.wait_connected(WAIT_S)
    await until(engine.joined_file.exists)
    await home.end()
    await until(lambda: not engine.joined_file.exists())
    await home.begin()
    await until(engine.joined_file.exists)
    await engine.vanish()
    await engine.begin()
    await until(engine.joined_file.exists)


async def test_who_finds_no_place_waits_for_one(client: EngineClient, home: JoinableHome) -> None:
    first, second = home.engine(), home.engine()
    await first.begin()
    await client.wait_connected(WAIT_S)
    first_id = client.status.engine_id
    await second.begin()
    await asyncio.sleep(0)
    assert home.relay is not None and len(home.relay.joined) == 1
    await first.end()
    await until(lambda: client.connected and client.status.engine_id != first_id)
    assert len(await generate(client)) == 3


async def test_each_has_a_place_of_its_role() -> None:
    """An engine waits that finds none of its role, though there are others."""
    with scratch_for_a_while() as folder:
        home = JoinableHome(Path(folder) / "home", ("prefill", "decode", "decode"))
        await home.begin()
        assert home.relay is not None
        joined = home.relay.joined
        prefill, second = home.engine(role="prefill"), home.engine(role="prefill")
        decode = home.engine(role="decode")
        for each in (decode, prefill, second):
            await each.begin()
        clients = [
            await EngineClient.connect(home.addresses[at], timeout_s=WAIT_S) for at in (0, 1)
        ]
        joined = home.relay.joined
        assert {*joined} == {"penny/0", "penny/1"}
        for client, engine in zip(clients, (prefill, decode), strict=True):
            assert client.status.engine_id == engine.core.status().engine_id
        await prefill.vanish()
        await until(lambda: clients[0].status.engine_id == second.core.status().engine_id)
        for client in clients:
            await client.close()
        await home.close()


async def test_a_place_that_gets_another_role_is_left() -> None:
    with scratch_for_a_while() as folder:
        home = JoinableHome(Path(folder) / "home", ("prefill", "decode"))
        await home.begin()
        assert home.relay is not None
        engine = home.engine(role="prefill")
        await engine.begin()
        await until(lambda: "penny/0" in (home.relay and home.relay.joined or {}))
        both = tuple(msgspec.structs.replace(each, role="both") for each in home.model.places)
        await home.relay.take_up(home.config(places=both))
        assert home.relay.joined == {}
        await home.close()


async def test_one_that_comes_again_before_it_is_missed_has_its_place(
    home: JoinableHome, client: EngineClient
) -> None:
    engine = home.engine()
    await engine.begin()
    await client.wait_connected(WAIT_S)
    assert engine.entrance is not None
    writer, _ = await engine.entrance._introduce(is_ready=True)
    await until(lambda: not client.connected)
    writer.transport.abort()
    await until(lambda: client.connected)
    assert len(await generate(client)) == 3


async def test_a_certificate_is_renewed_before_it_ends(
    home: JoinableHome, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = home.engine()
    await engine.begin()
    await client.wait_connected(WAIT_S)
    before = (engine.folder / "identity").read_bytes()
    await engine.vanish()
    monkeypatch.setattr("engine.transport.join_identity.RENEW_PART", 1.0)
    await engine.begin()
    await until(lambda: client.connected)
    after = (engine.folder / "identity").read_bytes()
    assert after != before and after.split(b"CERT")[0] == before.split(b"CERT")[0]
    assert len(await generate(client)) == 3


async def test_other_settings_leave_who_is_there_where_it_is(
    home: JoinableHome, client: EngineClient
) -> None:
    engine = home.engine()
    await engine.begin()
    await client.wait_connected(WAIT_S)
    stream = client.generate(request(300))
    first = await anext(stream)
    assert home.relay is not None
    another = JoinPlace(replica="penny/1", address=f"unix:{home.folder}/engine-1.sock")
    await home.relay.take_up(home.config(places=(*home.model.places, another)))
    assert len(first.token_ids) + len(await rest_of(stream)) == 300
    await home.relay.take_up(home.config(places=()))
    await until(lambda: not client.connected)
