"""Models of a hub over HTTP: verified, one download for all processes, and no byte twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.model_cache.cache import Access, ModelCache
from engine.model_cache.hub_files import HubAccess
from engine.model_cache.sources import parse_source
from tests.engine.model_cache.remote import FILES, tell
from tests.engine.text.hub_server import ROOT, Hub

WEIGHTS = "model.safetensors"
SOURCE = parse_source("hf:acme/penny")
FETCH = """
import logging, sys
from pathlib import Path
from engine.model_cache.cache import Access, ModelCache
from engine.model_cache.hub_files import HubAccess
from engine.model_cache.sources import parse_source
logging.basicConfig(level="INFO")
access = Access(hub=HubAccess(endpoint=sys.argv[2]))
found = ModelCache(Path(sys.argv[1]), 1 << 30, access).fetch(parse_source(sys.argv[3]), print)
print(found.version)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as started:
        yield started


def cache_of(tmp_path: Path, hub: Hub, token: str | None = None) -> ModelCache:
    return ModelCache(tmp_path, 1 << 30, Access(hub=HubAccess(hub.url, token)))


def start(tmp_path: Path, hub: Hub) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, str(tmp_path), hub.url, str(SOURCE)],
        cwd=ROOT,
        # On a busy machine nobody gives up while the other is still starting.
        env=hub.environment(tmp_path / "hf", HF_HUB_DOWNLOAD_TIMEOUT="120"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_download_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    content = bytes(range(256)) * (16 << 10)
    hub.push("acme/penny", {**FILES, WEIGHTS: content})
    hub.stall_once.add(WEIGHTS)
    process = start(tmp_path, hub)
    assert hub.stalled.wait(60)
    (partial,) = iter_until_there(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    came = partial.stat().st_size
    assert 0 < came <= len(content) // 2
    hub.requests.clear()
    found = cache_of(tmp_path, hub).fetch(SOURCE, tell)
    assert (found.folder / WEIGHTS).read_bytes() == content
    ranges = [asked for _, path, asked in hub.requests if path.endswith(WEIGHTS)]
    assert ranges == [f"bytes={came}-"]
    assert not list((tmp_path / "partial").iterdir())


def iter_until_there(tmp_path: Path) -> list[Path]:
    """Wait until a part of the weights is on the disk."""
    while True:
        found = [each for each in (tmp_path / "partial").rglob(WEIGHTS) if each.stat().st_size]
        if found:
            return found
        time.sleep(0.01)


def test_two_processes_download_once(hub: Hub, tmp_path: Path) -> None:
    hub.push("acme/penny", FILES)
    gate = hub.gates[WEIGHTS] = threading.Event()
    both = [start(tmp_path, hub) for _ in range(2)]
    readers = [threading.Thread(target=read_until_waiting, args=(each, gate)) for each in both]
    for reader in readers:
        reader.start()
    found = {each.wait(120) for each in both}
    for reader in readers:
        reader.join()
    said = [each.stdout.read().splitlines()[-1] for each in both if each.stdout is not None]
    for each in both:
        each.communicate()
    assert found == {0} and said[0] == said[1] and gate.is_set()
    assert sorted(hub.downloaded()) == sorted(FILES)


def read_until_waiting(process: subprocess.Popen[str], gate: threading.Event) -> None:
    """Open the gate once a process says that it waits for the other."""
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting for another process" in line:
            gate.set()


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_what_is_not_what_the_hub_says_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.push("acme/penny", FILES)
    hub.damaged.add(name)
    with pytest.raises(ConfigError, match=f"hf:acme/penny: {name} is not what its checksum says"):
        cache_of(tmp_path, hub).fetch(SOURCE, tell)
    assert not list(tmp_path.rglob(name))


def test_a_revision_stays_that_of_its_commit(hub: Hub, tmp_path: Path) -> None:
    commit = hub.push("acme/penny", FILES, branch="v1")
    first = cache_of(tmp_path, hub).fetch(parse_source("hf:acme/penny@v1"), tell)
    assert first.state == commit
    hub.push("acme/penny", {**FILES, "config.json": b"[]"}, branch="v1")
    cache = cache_of(tmp_path, hub)
    second = cache.fetch(parse_source("hf:acme/penny@v1"), tell)
    assert second.version != first.version
    same = cache.fetch(parse_source("hf:acme/penny@v1"), tell, revision=commit)
    assert same.version == first.version
    texts = cache.fetch(parse_source("hf:acme/penny@v1"), tell, part="texts")
    assert sorted(each.name for each in texts.folder.iterdir()) == ["config.json", "tokenizer.json"]


def test_a_hub_that_refuses_is_one_line(hub: Hub, tmp_path: Path) -> None:
    cache = cache_of(tmp_path, hub, token="hf_secret")
    with pytest.raises(ConfigError, match="no model on http"):
        cache.fetch(SOURCE, tell)
    hub.push("acme/penny", FILES)
    hub.repositories["acme/penny"].gated = True
    with pytest.raises(ConfigError, match="is gated: accept its terms") as refused:
        cache.fetch(SOURCE, tell)
    assert "hf_secret" not in str(refused.value)
