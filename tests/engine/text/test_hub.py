"""Models by name, from a hub on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.text.hub import names_a_repository
from engine.transport.client import EngineClient
from tests.engine import checkpoints
from tests.engine.peers import until
from tests.engine.text.hub_server import FETCH, ROOT, Hub, run_fetch

NAME = "acme/tiny-1.5B"
MIB = 1 << 20
WEIGHTS = os.urandom(24 * MIB)
"""Exceeds what the library buffers before it writes."""
SINGLE = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": WEIGHTS,
}
SHARDED = {
    "config.json": b"{}",
    "generation_config.json": b'{"a": 1}',
    "tokenizer.json": b'{"a": 2}',
    "tokenizer_config.json": b'{"a": 3}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    ).encode(),
    "part-1.safetensors": b"1" * 1000,
    "part-2.safetensors": b"2" * 1000,
}
UNWANTED = {
    "consolidated.safetensors": b"the same weights once more",
    "pytorch_model.bin": b"a pickle",
    "training_args.pt": b"a pickle",
    "modeling_tiny.py": b"a program",
    "README.md": b"words",
    "onnx/model.safetensors": b"another model",
    "original/params.json": b"{}",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as started:
        yield started


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def folder_of(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split(maxsplit=1)[1].strip())


def test_what_names_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_a_repository(NAME)
    for path in ("models", "/models/penny", "./models/penny", "models/a/b", "models/", "../x"):
        assert not names_a_repository(path)
    (tmp_path / NAME).mkdir(parents=True)
    assert not names_a_repository(NAME), "a folder that is there is meant"


def test_weights_and_texts_are_fetched_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    commit = hub.push(NAME, SHARDED | UNWANTED)
    done = run_fetch(hub.environment(tmp_path), NAME)
    assert files(folder_of(done)) == SHARDED
    assert done.stdout.startswith(commit)
    assert f"{NAME}@{commit}: 8 files" in done.stderr
    assert "%|" not in done.stderr, "a progress bar is for a terminal"
    assert set(hub.downloaded()) == set(SHARDED)


def test_how_a_model_embeds_is_fetched(hub: Hub, tmp_path: Path) -> None:
    """Also where only the rest is in the cache."""
    environment = hub.environment(tmp_path)
    files_of = SINGLE | {"modules.json": b'[{"path": "1_Pooling"}]', "1_Pooling/config.json": b"{}"}
    commit = hub.push(NAME, files_of | {"2_Dense/model.safetensors": b"weights"})
    folder = folder_of(run_fetch(environment, NAME))
    assert files(folder) == files_of
    (folder / "1_Pooling" / "config.json").unlink()
    assert files(folder_of(run_fetch(environment, NAME, commit))) == files_of


def test_the_texts_alone(hub: Hub, tmp_path: Path) -> None:
    hub.push(NAME, SINGLE)
    done = run_fetch(hub.environment(tmp_path), NAME, weights=False)
    assert set(files(folder_of(done))) == {"config.json", "tokenizer.json"}
    whole = run_fetch(hub.environment(tmp_path), NAME)
    assert files(folder_of(whole)) == SINGLE, "what is in the cache in part is completed"


def test_a_cut_download_goes_on_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.push(NAME, SINGLE)
    hub.cut_once.add("model.safetensors")
    done = run_fetch(hub.environment(tmp_path), NAME)
    assert files(folder_of(done)) == SINGLE
    asked = [r for method, path, r in hub.requests if method == "GET" and "model.safe" in path]
    assert asked[0] is None
    assert asked[1:] == [f"bytes={12 * MIB}-"]


async def test_what_is_interrupted_goes_on_at_the_next_start(hub: Hub, tmp_path: Path) -> None:
    hub.push(NAME, SINGLE)
    hub.stall_once.add("model.safetensors")
    first = subprocess.Popen(
        [sys.executable, "-c", FETCH, NAME, "", "True"], cwd=ROOT, env=hub.environment(tmp_path)
    )
    try:
        await until(hub.stalled.is_set, 60)
        (part,) = tmp_path.rglob("*.part")
        await until(lambda: part.stat().st_size > 8 * MIB)
    finally:
        first.kill()
        first.wait()
    came = part.stat().st_size
    assert files(folder_of(run_fetch(hub.environment(tmp_path), NAME))) == SINGLE
    asked = [r for method, path, r in hub.requests if method == "GET" and "model.safe" in path]
    assert asked == [None, f"bytes={came}-"]
    assert not list(tmp_path.rglob("*.part"))


def test_a_commit_stays_and_a_branch_moves(hub: Hub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    first = hub.push(NAME, SINGLE)
    folder_of(run_fetch(environment, NAME))
    second = hub.push(NAME, SINGLE | {"config.json": b'{"new": 1}'})
    hub.requests.clear()
    pinned = run_fetch(environment, NAME, first)
    assert files(folder_of(pinned))["config.json"] == b"{}"
    assert hub.requests == [], "a commit that is there whole needs no hub"
    moved = run_fetch(environment, NAME)
    assert moved.stdout.startswith(second)
    assert "model.safetensors" not in hub.downloaded(), "the weights are the same file"


def test_without_a_hub_the_cache_serves(hub: Hub, tmp_path: Path) -> None:
    commit = hub.push(NAME, SINGLE)
    environment = hub.environment(tmp_path)
    folder = folder_of(run_fetch(environment, NAME))
    hub.requests.clear()
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    assert folder_of(run_fetch(offline, NAME)) == folder
    unknown = run_fetch(offline, "acme/other")
    assert "acme/other is no folder here, not whole in the cache" in unknown.stderr
    assert "HF_HUB_OFFLINE is set" in unknown.stderr
    assert hub.requests == []
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens there
    assert folder_of(run_fetch(environment, NAME)) == folder
    (folder / "model.safetensors").unlink()
    broken = run_fetch(environment, NAME, commit)
    assert broken.returncode == 1
    assert "not whole in the cache, and cannot be fetched: http://127.0.0.1:9" in broken.stderr
    assert one_line(broken)


def one_line(done: subprocess.CompletedProcess[str]) -> bool:
    """Return what the operator is told at last, a line of its own."""
    return done.stderr.strip().rpartition("\n")[2].startswith("refused: ")


REFUSALS = {
    "unknown": ("acme/nobody", "", r"acme/nobody is no folder here and no model on http://127"),
    "revision": (NAME, "v9", f"{NAME} has no revision 'v9' on"),
    "gated": ("acme/gated", "", "acme/gated is gated: accept its terms on http://127"),
    "pickles": ("acme/pickles", "", "has no weights in safetensors: model.safetensors is missing, "
                "only pytorch_model.bin"),
    "elsewhere": ("acme/elsewhere", "", "no weights in safetensors: ../x.safetensors is missing"),
    "no index": ("acme/broken", "", "model.safetensors.index.json is no index of safetensors"),
    "no config": ("acme/gguf", "", "has no config.json"),
}  # fmt: skip


@pytest.fixture(scope="module")
def crowded() -> Iterator[Hub]:
    index = "model.safetensors.index.json"
    outside = json.dumps({"weight_map": {"a": "../x.safetensors"}}).encode()
    with Hub() as hub:
        hub.push(NAME, SINGLE)
        hub.push("acme/gated", SINGLE)
        hub.repositories["acme/gated"].gated = True
        hub.push("acme/pickles", {"config.json": b"{}", "pytorch_model.bin": b""})
        hub.push("acme/elsewhere", {"config.json": b"{}", index: outside})
        hub.push("acme/broken", {"config.json": b"{}", index: b"[]"})
        hub.push("acme/gguf", {"model.gguf": b""})
        yield hub


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refusal_is_one_line(what: str, crowded: Hub, tmp_path: Path) -> None:
    name, revision, message = REFUSALS[what]
    done = run_fetch(crowded.environment(tmp_path), name, revision)
    assert done.returncode == 1
    assert message in done.stderr
    assert one_line(done)


def test_a_terminal_shows_progress(hub: Hub, tmp_path: Path) -> None:
    hub.push(NAME, SINGLE)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                shown.append(data)
        except OSError:  # the other side has closed (pty(7): EIO)
            return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        subprocess.run(
            [sys.executable, "-c", FETCH, NAME, "", "True"],
            cwd=ROOT,
            env=hub.environment(tmp_path, TERM="xterm"),
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=120,
            check=True,
        )
    finally:
        os.close(theirs)
        reader.join(60)
        os.close(ours)
    assert b"100%, 25 of 25 MB, " in b"".join(shown)


async def test_the_engine_serves_a_model_by_its_name(hub: Hub, tmp_path: Path) -> None:
    commit = hub.push_folder(NAME, checkpoints.save("llama3", tmp_path / "stored"))
    address = f"unix:{tmp_path}/engine.sock"
    command = [sys.executable, "-m", "engine", "--model", NAME, "--revision", commit]
    command += ["--listen", address, "--num-blocks", "64", "--num-threads", "1"]
    environment = hub.environment(tmp_path / "cache", OMP_NUM_THREADS="1")
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        client = await EngineClient.connect(address, timeout_s=60)
        assert client.status.model == NAME
        await client.close()
    finally:
        process.terminate()
        assert await asyncio.to_thread(process.wait, 30) == 0
