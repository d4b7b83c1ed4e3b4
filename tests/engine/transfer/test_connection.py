"""Blocks of another engine: what is read is what was asked for, or nothing."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import ConfigError, ProtocolError
from engine.kv_cache.block_holds import BlockRange, raise_generation
from engine.transfer.connection import PeerConnection
from engine.transfer.messages import BlocksHeld
from engine.transfer.serving import BlockServer, _Borrower
from engine.transfer.shared_pool import PoolShape, SharedPool, map_pool
from tests.budget import examples
from tests.engine.transfer.owner import BLOCK_BYTES, LAYOUT, Owner, connect, content_of

PROMPT = list(range(17))
"""Four blocks and a token."""

REPO = Path(__file__).parents[3]


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.close()


def read(peer: PeerConnection, held: BlocksHeld | None) -> NDArray[np.uint8]:
    """Return the whole blocks of a hold."""
    assert held is not None
    rows = np.zeros((len(held.blocks), BLOCK_BYTES), np.uint8)
    return rows[: peer.read(held, 0, rows)]


@pytest.mark.parametrize("offers_memory", [True, False])
def test_what_is_cached_is_read(owner: Owner, offers_memory: bool) -> None:
    digests = owner.compute(PROMPT)
    peer = connect(owner.serve(offers_memory=offers_memory).address)
    assert peer.engine_id == "owner" and peer.via == ("memory" if offers_memory else "socket")
    rows = read(peer, peer.hold(digests, 1, 1.0))
    assert len(rows) == 3
    for row, digest in zip(rows, digests[1:], strict=True):
        assert np.array_equal(row, content_of(digest))
    assert peer.hold([b"x" * 32, *digests], 0, 1.0) is None
    assert peer.hold(digests, 4, 1.0) is None
    peer.close()


@pytest.mark.parametrize("offers_memory", [True, False])
def test_what_was_evicted_since_is_not_read(owner: Owner, offers_memory: bool) -> None:
    digests = owner.compute(PROMPT)
    peer = connect(owner.serve(offers_memory=offers_memory).address)
    held = peer.hold(digests, 0, 1.0)
    owner.compute(range(100, 196))  # nothing was kept: no step began since
    assert len(read(peer, held)) == 0
    peer.close()


@pytest.mark.parametrize("offers_memory", [True, False])
def test_what_is_held_is_not_evicted(owner: Owner, offers_memory: bool) -> None:
    digests = owner.compute(PROMPT)
    peer = connect(owner.serve(offers_memory=offers_memory).address)
    held = peer.hold(digests, 0, 1.0)
    owner.holds.advance()
    assert owner.holds.num_blocks == 4
    owner.compute(range(100, 180))
    assert len(read(peer, held)) == 4
    owner.now_s = 2.0
    owner.holds.advance()
    assert owner.holds.num_blocks == 0 and owner.holds.num_expired == 1
    owner.compute(range(200, 296))
    assert len(read(peer, held)) == 0
    peer.close()


def test_holds_end_with_their_connection(owner: Owner) -> None:
    digests = owner.compute(PROMPT)
    server = owner.serve()
    peer = connect(server.address)
    held = peer.hold(digests, 0, 30.0)
    other = peer.hold(digests, 0, 30.0)
    assert held is not None and other is not None
    peer.release(held)
    assert peer.hold(digests, 4, 1.0) is None  # what was said before is done by now
    owner.holds.advance()
    assert owner.holds.num_blocks == 4
    ended = threading.Event()
    release = owner.holds.release
    owner.holds.release = lambda hold_id: (release(hold_id), ended.set())  # type: ignore[func-returns-value, assignment]
    peer.close()
    assert ended.wait(30)
    owner.holds.advance()
    assert owner.holds.num_blocks == 0 and owner.holds.num_expired == 0


def test_what_was_held_is_forgotten_and_only_released_by_who_asked_for_it(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    fronts: list[dict[int, BlockRange]] = []

    class Watched(_Borrower):
        def __init__(self) -> None:
            super().__init__()
            fronts.append(self.fronts)

    monkeypatch.setattr("engine.transfer.serving._Borrower", Watched)
    digests = owner.compute(PROMPT)
    address = owner.serve().address
    peer, other = connect(address), connect(address)
    held = peer.hold(digests, 0, 1.0)
    assert held is not None and held.hold_id
    other.release(held)
    assert other.hold(digests, 4, 1.0) is None, "what was said before is done by now"
    assert owner.holds.is_held(held.hold_id)
    for _ in range(3):
        owner.now_s += 1.0
        owner.holds.advance()
        assert (again := peer.hold(digests, 0, 1.0)) is not None
        assert [len(each) for each in fronts if each] == [1] and again.hold_id
    for each in (peer, other):
        each.close()


def test_a_server_that_can_open_no_file_rests_and_goes_on(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.transfer.serving.ACCEPT_PAUSE_S", 0.001)
    accept, fails = socket.socket.accept, iter([True, True])

    def refuse(listener: socket.socket) -> tuple[socket.socket, object]:
        accepted = accept(listener)
        if next(fails, False):
            accepted[0].close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accepted

    monkeypatch.setattr(socket.socket, "accept", refuse)
    address = owner.serve().address
    for _ in range(2):
        with pytest.raises((OSError, ProtocolError)):
            connect(address)
    connect(address).close()
    assert caplog.text.count("cannot accept another engine") == 2


def test_a_block_that_is_written_to_amid_a_copy_is_dropped(owner: Owner) -> None:
    """Between the parts of the copy the second block becomes another one."""
    digests = owner.compute(PROMPT)
    peer = connect(owner.serve().address)
    held = peer.hold(digests, 0, 1.0)
    assert held is not None and peer._pool is not None
    parts = peer._pool._parts

    def interrupted() -> Iterator[NDArray[np.uint8]]:
        yield parts[0]
        raise_generation(owner.pool.generations, held.blocks[1])
        yield from parts[1:]

    peer._pool._parts = interrupted()  # type: ignore[assignment]
    assert len(read(peer, held)) == 1
    peer.close()


def test_another_token_or_layout_is_refused(owner: Owner) -> None:
    server = owner.serve(token="right")
    with pytest.raises(ProtocolError, match="the token is another one"):
        connect(server.address, token="wrong")
    with pytest.raises(ProtocolError, match="the layout is another one"):
        connect(server.address, token="right", layout=b"M" * 32)
    with pytest.raises(ProtocolError, match="have another size"):
        PeerConnection(server.address, token="right", layout=LAYOUT, block_bytes=1, timeout_s=30.0)
    connect(server.address, token="right").close()


def test_a_wrong_checksum_ends_the_connection(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = owner.compute(PROMPT)
    peer = connect(owner.serve(offers_memory=False).address)
    held = peer.hold(digests, 0, 1.0)
    monkeypatch.setattr("engine.transfer.serving.crc32", lambda read: 1)
    with pytest.raises(ProtocolError, match="checksum"):
        read(peer, held)
    peer.close()


def test_nonsense_ends_a_connection_and_harms_no_other(owner: Owner) -> None:
    server = owner.serve()
    path = server.address.removeprefix("unix:")
    for text in (b"\xff\xff\xff\xff", b"\0\0\0\x02{}", b"\0\0"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(text)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
    connect(server.address).close()


def test_an_address_that_is_taken_is_told(owner: Owner) -> None:
    path = owner.serve().address
    with pytest.raises(ConfigError, match="another process does"):
        BlockServer(
            path,
            owner.holds,
            owner.pool,
            engine_id="",
            layout=LAYOUT,
            block_bytes=1,
            num_blocks=1,
        )


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from([64, 24]), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 9)), min_size=1, max_size=4),
)
def test_blocks_are_read_whole_in_runs_of_any_length(
    part_bytes: list[int], runs: list[tuple[int, int]]
) -> None:
    pool = SharedPool(24, part_bytes)
    parts = [np.frombuffer(pool.part(each), np.uint8) for each in range(len(part_bytes))]
    for number, part in enumerate(parts):
        part[:] = np.random.default_rng(number).integers(0, 256, part.shape)
    blocks = [block for first, count in runs for block in range(first, first + count)]
    rows = np.zeros((len(blocks), pool.shape.block_bytes), np.uint8)
    assert pool.read(blocks, [0] * len(blocks), rows) == len(blocks)
    for block, row in zip(blocks, rows, strict=True):
        assert row.tobytes() == b"".join(part.reshape(24, -1)[block].tobytes() for part in parts)
    pool.close()


def test_the_pool_of_another_can_not_be_written_or_shrunk() -> None:
    pool = SharedPool(4, (64, 32))
    mapped = map_pool(pool.fd, PoolShape(4, (64, 32)))
    with pytest.raises(ValueError, match="read-only"):
        mapped._parts[0][0] = 1
    with pytest.raises(OSError):
        os.ftruncate(pool.fd, 0)
    with pytest.raises(ProtocolError, match="another size"):
        map_pool(pool.fd, PoolShape(5000, (64, 32)))
    pool.close()
    with open("/proc/self/exe", "rb") as file, pytest.raises((ProtocolError, OSError)):
        map_pool(file.fileno(), PoolShape(4, (64, 32)))


OWNER = """
    import sys
    from pathlib import Path
    from tests.engine.transfer.owner import Owner
    owner = Owner(Path(sys.argv[1]))
    owner.compute(range(17))
    print(owner.serve(offers_memory=sys.argv[2] == "memory").address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("via", ["memory", "socket"])
def test_an_owner_that_dies_or_hangs_amid_a_read_brings_nothing_wrong(
    tmp_path: Path, how: signal.Signals, via: str
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path), via],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
    )
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        peer = connect(address, timeout_s=0.2)
        here = Owner(tmp_path / "unused")
        digests = here.compute(PROMPT)
        here.close()
        held = peer.hold(digests, 0, 30.0)
        assert held is not None and len(held.blocks) == 4
        child.send_signal(how)
        rows = np.zeros((4, BLOCK_BYTES), np.uint8)
        if via == "memory":  # what is mapped stays, and is what it was
            assert peer.read(held, 0, rows) == 4
            assert all(map(np.array_equal, rows, map(content_of, digests)))
        else:
            with pytest.raises((OSError, ProtocolError)):
                while True:  # what it had sent before its end may still come
                    num_good = peer.read(held, 0, rows)
                    assert all(map(np.array_equal, rows[:num_good], map(content_of, digests)))
        peer.close()
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.close()
        child.stdout.close()
