"""Checks who has a prompt: by the index, by what was sent, and by that alone when nobody writes
it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.fake.engine import FakeCore
from engine.prefix_digests import span_keys
from engine.protocol import EngineRequest, ReplicaStatus
from gateway.fleet.conductor.index_writer import KvIndexWriter
from gateway.fleet.engine.cached_prefixes import SILENT_S, cached_tokens
from gateway.fleet.engine.job import EngineJob
from gateway.fleet.engine.prefix_memory import PrefixMemory
from gateway.fleet.kv_index import KvIndex

PROMPT = [*range(1, 513)]
KEYS = span_keys("org", PROMPT, 16)
STATUS = FakeCore().status()


class Replica:
    """An engine as a worker knows it from afar, in a home whose index is in this folder."""

    def __init__(self, index: KvIndex | None, engine_id: str) -> None:
        self.index, self.sent = index, PrefixMemory()
        self.status: ReplicaStatus | None = msgspec.structs.replace(STATUS, engine_id=engine_id)


def prepared(token_ids: list[int], salt: str = "org") -> Any:
    job = EngineJob(
        request=EngineRequest(request_id="", prompt_token_ids=token_ids),
        param_names={},
        span_keys=span_keys(salt, token_ids, 16),
    )
    return SimpleNamespace(payload=job)


@pytest.fixture
def writer(tmp_path: Path) -> KvIndexWriter:
    made = KvIndexWriter(tmp_path / "index")
    made.publish()
    made.told()
    for engine_id in "abc":
        made.add(engine_id, 10)
    return made


def test_of_index_and_what_was_sent_the_more_counts(tmp_path: Path, writer: KvIndexWriter) -> None:
    index = KvIndex(tmp_path / "index")
    replicas = [Replica(index, engine_id) for engine_id in "abc"]
    writer.store("a", b"".join(key.to_bytes(8, "little") for key in KEYS[:2]))
    writer.store("b", b"".join(key.to_bytes(8, "little") for key in KEYS))
    assert cached_tokens(prepared(PROMPT), replicas) == [256, 511, 0], "one is always computed"
    assert cached_tokens(prepared([*PROMPT, 7]), replicas) == [256, 512, 0]
    replicas[0].sent.sent(KEYS[:3], 128, "a")
    replicas[2].sent.sent(KEYS[:1], 128, "c")
    assert cached_tokens(prepared(PROMPT), replicas) == [384, 511, 128]
    replicas[1].status = None
    assert cached_tokens(prepared(PROMPT), replicas) == [384, 0, 128]
    assert cached_tokens(prepared(PROMPT[:100]), replicas) == [0, 0, 0], "of no whole span"


def test_another_tenant_finds_nothing_cached(tmp_path: Path, writer: KvIndexWriter) -> None:
    replicas = [Replica(KvIndex(tmp_path / "index"), engine_id) for engine_id in "ab"]
    writer.store("a", b"".join(key.to_bytes(8, "little") for key in KEYS))
    replicas[1].sent.sent(KEYS, 128, "b")
    assert cached_tokens(prepared(PROMPT), replicas) == [511, 511]
    assert cached_tokens(prepared(PROMPT, salt="another org"), replicas) == [0, 0]


def test_once_the_index_is_not_written_any_more_all_that_was_sent_counts(tmp_path: Path) -> None:
    now, age_s = time.time(), SILENT_S / 2
    writer = KvIndexWriter(tmp_path / "index", clock=lambda: now - age_s)
    writer.publish()
    writer.told()
    replica = Replica(KvIndex(tmp_path / "index"), "a")
    replica.sent = PrefixMemory(clock=iter([0.0, 100.0, 200.0]).__next__)
    replica.sent.sent(KEYS, 128, "a")
    assert cached_tokens(prepared(PROMPT), [replica]) == [0], "the index would have it by now"
    age_s = 2 * SILENT_S
    writer.told()
    assert cached_tokens(prepared(PROMPT), [replica]) == [511]
    replica.index = KvIndex(tmp_path / "none")
    replica.sent = PrefixMemory()
    replica.sent.sent(KEYS, 128, "a")
    assert cached_tokens(prepared(PROMPT), [replica]) == [511]
