"""An engine tells over its socket what is in its prefix cache: to whom, when, and from when on."""

from __future__ import annotations

import pytest

import engine.transport.step_loop
from engine.fake.engine import FakeCore
from engine.prefix_digests import span_keys
from engine.protocol import CacheChanged, CacheSnapshot, ReplicaStatus, WatchCache
from engine.transport.client import EngineClient
from tests.engine.peers import SMALL, Join, Serve, ask, collect, submit, until

PROMPT = [*range(1, 301)]
"""Two spans and a part of one."""
OTHER = [7] * 128


class Listener:
    """Keeps what it hears. `is_content`: what it says to each of it."""

    def __init__(self, *, is_content: bool = True) -> None:
        self.news: list[CacheSnapshot | CacheChanged] = []
        self.engines: list[str] = []
        self.num_lost = 0
        self.is_content = is_content

    def connected(self, status: ReplicaStatus) -> None:
        self.engines.append(status.engine_id)

    def heard(self, news: CacheSnapshot | CacheChanged) -> bool:
        self.news.append(news)
        return self.is_content

    def lost(self) -> None:
        self.num_lost += 1


def packed(prompt: list[int], salt: str = "") -> bytes:
    return b"".join(key.to_bytes(8, "little") for key in span_keys(salt, prompt, 16))


async def test_a_watcher_hears_what_there_is_and_what_changes(serve: Serve) -> None:
    server = await serve(FakeCore(SMALL))
    asker = await EngineClient.connect(server.address, timeout_s=30)
    await collect(asker, ask("a", PROMPT, salt="org"))
    listener = Listener()
    client = EngineClient(server.address, cache_hearer=listener)
    client.start()
    await until(lambda: len(listener.news) == 1)
    assert listener.news == [CacheSnapshot(seq=0, keys=packed(PROMPT, "org"), last=True)]
    assert listener.engines == [asker.status.engine_id]
    await collect(asker, ask("b", PROMPT, salt="org"))
    await collect(asker, ask("c", OTHER, salt="another"))
    await until(lambda: len(listener.news) == 2)
    change = listener.news[1]
    assert isinstance(change, CacheChanged)
    assert (change.seq, change.stored, change.removed) == (1, packed(OTHER, "another"), b"")
    await client.close()
    await asker.close()
    assert listener.num_lost == 0


async def test_who_missed_something_is_told_all_anew(serve: Serve) -> None:
    server = await serve(FakeCore(SMALL))
    listener = Listener()
    client = EngineClient(server.address, cache_hearer=listener)
    client.start()
    await until(lambda: len(listener.news) == 1)
    listener.is_content = False
    await collect(client, ask("a", OTHER))
    await until(lambda: len(listener.news) >= 3)
    listener.is_content = True
    assert isinstance(listener.news[1], CacheChanged)
    assert listener.news[2] == CacheSnapshot(seq=1, keys=packed(OTHER), last=True)
    await client.close()


async def test_changes_wait_for_their_time_and_are_told_together(
    serve: Serve, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.transport.step_loop, "CACHE_INTERVAL_S", 3600.0)
    peer = await join(await serve(FakeCore(SMALL)))
    peer.say(WatchCache())
    assert isinstance(await peer.next(), CacheSnapshot)
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        peer.say(submit(name, prompt))
        await peer.last_of(name)
    monkeypatch.setattr(engine.transport.step_loop, "CACHE_INTERVAL_S", 0.0)
    peer.say(submit("c"))
    while not isinstance(peer.heard[-1], CacheChanged):
        await peer.next()
    (change,) = (each for each in peer.heard if isinstance(each, CacheChanged))
    assert change.stored == packed(PROMPT) + packed(OTHER)


async def test_nothing_is_collected_for_who_has_left(serve: Serve, join: Join) -> None:
    core = FakeCore(SMALL)
    server = await serve(core)
    watcher, asker = await join(server), await join(server)
    watcher.say(WatchCache())
    assert isinstance(await watcher.next(), CacheSnapshot)
    watcher.vanish()
    await until(lambda: not server._watchers)
    for name, prompt in (("behind its end", PROMPT), ("later", OTHER)):
        asker.say(submit(name, prompt))
        await asker.last_of(name)
    assert not core.cache_events.has_changes
