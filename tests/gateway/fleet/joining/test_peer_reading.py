"""Engines that joined one home read each other's KV over TLS, and nobody else reads it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from engine.__main__ import _met_by_certificate
from engine.core.block_sharing import check_peers
from engine.errors import ProtocolError
from engine.protocol import KVSource
from engine.tiers.sources import Signal
from engine.transfer.messages import Answer, Channel, Hello
from engine.transfer.peer_tls import PeerTls
from engine.transfer.peers import PeerSource
from tests.engine.transfer.owner import BLOCK_BYTES, LAYOUT, Owner, connect, content_of
from tests.gateway.fleet.joining.home_of_engines import CONFIG, WAIT_S, JoinableHome, until
from tests.scratch import scratch_for_a_while

PROMPT = list(range(17))
"""Four blocks and a token."""


async def identity_in(home: JoinableHome) -> PeerTls:
    """Return the certificate of an engine that has joined."""
    engine = home.engine()
    await engine.begin()
    await engine.end()
    return PeerTls(engine.folder / "identity")


@pytest_asyncio.fixture
async def homes() -> AsyncIterator[list[JoinableHome]]:
    with scratch_for_a_while() as folder:
        made = [JoinableHome(Path(folder) / name) for name in ("one", "two")]
        for each in made:
            await each.begin()
        yield made
        for each in made:
            await each.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path)
    yield made
    made.close()


async def test_what_one_computed_another_reads(homes: list[JoinableHome], owner: Owner) -> None:
    one, other = await identity_in(homes[0]), await identity_in(homes[0])
    digests, server = owner.compute(PROMPT), owner.serve(tls=one)
    source = PeerSource(
        engine_id="reader",
        layout=LAYOUT,
        block_bytes=BLOCK_BYTES,
        token="",
        signal=Signal(),
        tls=other,
    )
    said = KVSource(engine_id="owner", address=server.address, num_tokens=16)
    source.expect(("r", 0), said, digests)
    reading = source.read(digests)
    found: list[np.ndarray] = []
    async with asyncio.timeout(WAIT_S):
        while not reading.is_over:
            if (arrival := reading.take()) is not None:
                found.extend(row.copy() for row in arrival.rows)
                arrival.give_back()
            await asyncio.sleep(0.001)
    assert len(found) == len(digests)
    assert all(map(np.array_equal, found, map(content_of, digests)))
    assert source.num_bytes == {"memory": 0, "socket": len(digests) * BLOCK_BYTES}
    source.close()


async def test_an_engine_of_another_home_reads_nothing_and_is_not_read(
    homes: list[JoinableHome], owner: Owner
) -> None:
    ours, theirs = await identity_in(homes[0]), await identity_in(homes[1])
    server = owner.serve(tls=ours)
    with pytest.raises((OSError, ProtocolError)):
        await asyncio.to_thread(connect, server.address, tls=theirs)
    peer = await asyncio.to_thread(lambda: connect(server.address, tls=ours))
    peer.close()


async def test_who_has_no_certificate_hears_nothing(
    homes: list[JoinableHome], owner: Owner
) -> None:
    server = owner.serve(tls=await identity_in(homes[0]))
    host, _, port = server.address.removeprefix("tcp:").rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as plain:
        channel: Channel[Answer] = Channel(plain, Answer)
        channel.send(Hello(token="", layout=LAYOUT))
        with pytest.raises((OSError, ProtocolError)):
            assert await asyncio.to_thread(channel.receive) is not None


async def test_an_engine_finds_the_address_by_which_others_reach_it(
    homes: list[JoinableHome],
) -> None:
    engine = homes[0].engine()
    await engine.begin()
    assert engine.entrance is not None
    assert engine.entrance.own_host() == "127.0.0.1"
    asked = msgspec.structs.replace(CONFIG, peer_listen="tcp:0.0.0.0:0")
    found = _met_by_certificate(asked, engine.entrance)
    assert found.peer_listen == "tcp:127.0.0.1:0"
    assert found.peer_identity == engine.folder / "identity"
    check_peers(msgspec.structs.replace(found, peer_listen="tcp:10.0.0.1:0"))
    for address in ("unix:/kv", "tcp:127.0.0.1:0"):
        local = msgspec.structs.replace(asked, peer_listen=address)
        assert _met_by_certificate(local, engine.entrance) == local
    await until(lambda: bool(homes[0].relay and homes[0].relay.joined))
