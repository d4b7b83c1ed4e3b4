"""Gives a model the engine that runs, or another beside it, when settings change."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.options import EngineOptions
from gateway.fleet.joining.admission import read_config
from gateway.home import Home, engine_number
from gateway.processes import beside_engines, engine_set, restarter
from gateway.processes.beside_engines import ConductorPlace, LenderPlace, RelayPlace
from gateway.processes.engine_set import (
    TIER_PURPOSE,
    EngineSet,
    RunningEngine,
)
from gateway.processes.restarter import Restarter, StartError
from gateway.processes.start_view import IMPORTING, SERVING, EngineStages
from gateway.secret import Secret
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings, load

FAR = '[[model]]\nname = "far"\nupstream = "http://127.0.0.1:1/v1"\n'
PENNY = '[[model]]\nname = "penny"\npath = "models/penny"\n'
WAIT_S = 30.0
OTHER = '[[model]]\nname = "other"\npath = "models/penny"\n'


class Engines:
    """A set in which engines run that are no processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.set = EngineSet(Home(folder / "home"))

    def read(self, text: str) -> Settings:
        path = self.folder / "tollgate.toml"
        path.write_text(text)
        read = load({"config": path, "home": self.folder / "home"}, {})
        return msgspec.structs.replace(read, models=self.set.place(read.models))

    def run(self, text: str) -> list[RunningEngine]:
        """Have the engines of a file run, and return those that it needed anew."""
        return self.set._add_missing(self.read(text))


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


def addresses(settings: Settings) -> dict[str, str]:
    found = {each.name: " ".join(each.engines) for each in settings.models if each.starts_engine}
    return {name: shown(sockets) for name, sockets in found.items()}


def shown(sockets: str) -> str:
    return " ".join(each.rpartition("/")[2] for each in sockets.split())


def number(engine: RunningEngine) -> int:
    return engine_number(engine.address)


def test_at_first_each_has_the_number_of_its_place(engines: Engines) -> None:
    found = addresses(engines.read(FAR + PENNY + OTHER))
    assert found == {"penny": "engine-1.sock", "other": "engine-2.sock"}


@pytest.mark.parametrize(
    "text",
    [
        PENNY + FAR,
        FAR + OTHER + PENNY,
        FAR + PENNY + "tool_call_parser = 'hermes'\n",
        "[compat]\ndialect = 'vllm'\n" + FAR + PENNY,
    ],
)
def test_an_engine_stays_wherever_its_model_stands(engines: Engines, text: str) -> None:
    """Its share of the memory is another one beside another engine: that waits."""
    (penny,) = engines.run(FAR + PENNY)
    settings = engines.read(text)
    assert addresses(settings)["penny"] == "engine-1.sock"
    assert penny.options.kv_cache_fraction == EngineOptions().kv_cache_fraction


@pytest.mark.parametrize(
    "more",
    [
        "[engine]\nmax_num_seqs = 5\n",
        "[engine]\nkv_cache_bytes = 1000000\n",
        "[engine]\nkv_cache_fraction = 0.3\n",
        "[[model.adapter]]\nname = 'law'\npath = 'models/penny'\n",
    ],
)
def test_another_process_comes_beside_the_old_one(engines: Engines, more: str) -> None:
    (old,) = engines.run(PENNY)
    (new,) = engines.run(PENNY + more)
    assert (number(old), old.record) == (0, 1) and (number(new), new.record) == (1, 2)
    assert engines.set._home.usage_record("penny", new.record).name == "penny@2.record"
    engines.set._retiring[old.address] = engines.set._engines.pop(old.address)
    (back,) = engines.run(PENNY)
    assert (number(back), back.record) == (2, 3), "what ends still has its socket and its record"
    del engines.set._retiring[old.address]
    (other,) = engines.run(PENNY + "[engine]\nmax_num_seqs = 6\n")
    assert (number(other), other.record) == (0, 1)


def test_a_share_that_is_written_down_is_no_share_of_what_is_left(engines: Engines) -> None:
    one = PENNY + "[model.engine_options]\nkv_cache_fraction = 0.5\n"
    other = PENNY + "[model.engine_options]\nkv_cache_fraction = 0.4\n"
    engines.run(one)
    assert addresses(engines.read(one)) == {"penny": "engine-0.sock"}
    assert addresses(engines.read(other)) == {"penny": "engine-1.sock"}


async def test_an_engine_that_was_stopped_gives_its_place_back(engines: Engines) -> None:
    engines.run(FAR + PENNY)
    old = engines.read(FAR + PENNY)
    new = engines.read(FAR + PENNY + "[engine]\nmax_num_seqs = 5\n")
    assert await engines.set.stop_unwanted(new.models) == ["penny"]
    assert engines.set.all == []
    for settings, expected in ((new, 2), (old, 1)):
        (penny,) = engines.set._add_missing(settings)
        assert (number(penny), penny.record) == (expected, 1)
        del engines.set._engines[penny.address]


ENCRYPTED = "[engine]\nkv_disk = 'kv'\nkv_disk_encrypted = true\n"


async def test_an_engine_reads_the_key_of_its_disk_once_from_a_pipe(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in no argument, variable or log."""
    settings = engines.read(PENNY + ENCRYPTED)
    engines.set._home.create()
    secret = Secret.load_or_create(settings.secret_key_file)
    key = secret.current.derive(TIER_PURPOSE)
    started: list[tuple[str, bytes]] = []

    def spawn(name: str, argv: list[str], *, pass_fds: tuple[int, ...], **rest: Any) -> None:
        (pipe,) = pass_fds
        assert argv[-1] == f"--kv-key-file=/dev/fd/{pipe}" and "--kv-disk-encrypted" in argv
        said = repr((argv, rest))
        assert key.hex() not in said and secret.current.secret not in said
        started.append((name, Path(f"/dev/fd/{pipe}").read_bytes()))

    monkeypatch.setattr(engine_set, "spawn", spawn)
    (engine,) = engines.set._add_missing(settings)
    for _ in range(2):
        await engines.set._start(settings, engine)
    assert started == [("engine-0", key)] * 2
    settings.secret_key_file.unlink()
    with pytest.raises(StartError, match="secret_key_file: .*No such file"):
        await engines.set._start(settings, engine)


DEVICES = """
[engine]
kv_cache_bytes = 1_000_000_000
[fleet.planner]
step_bytes = 0
devices = [{ name = "cuda:0", bytes = 1_500_000_000 }, { name = "cuda:1", bytes = 1_500_000_000 }]
"""
TWICE = PENNY + "replicas = 2\n"


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, ["0", "1"]), ("5,GPU-7", ["5", "GPU-7"]), ("5", ["5", None])]
)
async def test_each_engine_sees_the_device_that_it_is_placed_on(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    expected: list[str | None],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    engines.set._home.create()
    seen: list[tuple[list[str], Mapping[str, str]]] = []
    monkeypatch.setattr(
        engine_set, "spawn", lambda name, argv, *, env, **rest: seen.append((argv, env))
    )
    settings = engines.read(TWICE + DEVICES)
    for engine, device in zip(engines.set._add_missing(settings), expected, strict=True):
        if device is None:
            problem = "fleet.planner.devices: cuda:1 is not among CUDA_VISIBLE_DEVICES=5"
            with pytest.raises(StartError, match=problem):
                await engines.set._start(settings, engine)
            continue
        for _ in range(2):  # also when it is started again
            await engines.set._start(settings, engine)
            argv, env = seen.pop()
            assert argv[argv.index("--device") + 1] == "cuda"
            assert env["CUDA_VISIBLE_DEVICES"] == device
    placed = [(each.engine, each.device) for each in engines.set.machine().placed()]
    assert placed == [("penny/0", "cuda:0"), ("penny/1", "cuda:1")]


async def test_what_runs_keeps_its_device_and_its_room_until_it_has_ended(
    engines: Engines,
) -> None:
    first, second = engines.run(TWICE + DEVICES)
    settings = engines.read(TWICE + OTHER + DEVICES)
    (other,) = engines.set._add_missing(settings)
    with pytest.raises(StartError, match=r"engine-2 of other: it takes .*; free are on cuda:0 0\."):
        await engines.set._start(settings, other)
    assert len(engines.set.machine().placed()) == 2
    del engines.set._engines[other.address]
    engines.set._retiring[first.address] = engines.set._engines.pop(first.address)
    (other,) = engines.run(PENNY + OTHER + DEVICES)
    assert other.device is not None and other.device.placement.device is None, "it has not ended"
    del engines.set._retiring[first.address], engines.set._engines[other.address]
    (other,) = engines.run(PENNY + OTHER + DEVICES)
    assert other.device is not None and other.device.placement.device == "cuda:0"
    assert second.device is not None and second.device.placement.device == "cuda:1"


async def test_one_that_grows_is_placed_beside_the_others_or_not_begun(engines: Engines) -> None:
    engines.run(TWICE + DEVICES)
    settings = engines.read(TWICE + DEVICES)
    with pytest.raises(StartError, match="engine-2 of penny: it takes"):
        await engines.set.begin_beside(settings.models[0], settings)
    assert len(engines.set._growing) == 0


def test_devices_of_a_kind_that_an_engine_does_not_run_on_are_not_its(engines: Engines) -> None:
    (engine,) = engines.run(PENNY + "engine_options = { device = 'cpu' }\n" + DEVICES)
    assert engine.device is None and engines.set.machine().placed() == []
    one = "[engine]\nkv_cache_bytes = 1000\n[fleet.planner]\n"
    (placed,) = engines.run(OTHER + one + "devices = [{ name = 'cpu', bytes = 2_000_000_000 }]\n")
    assert placed.device is not None and placed.device.placement.device == "cpu"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (DEVICES.replace("cuda:1", "cuda:0"), r"fleet.planner.devices\[1\].name: two are named"),
        (DEVICES.replace("cuda:1", "gpu1"), r"fleet.planner.devices\[1\].name"),
        (DEVICES.replace("kv_cache_bytes = 1_000_000_000", ""), r"model\[0\].*kv_cache_bytes"),
    ],
)
def test_devices_that_say_too_little_are_refused(engines: Engines, text: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        engines.read(PENNY + text)


async def test_each_engine_tells_how_far_its_version_is(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = IMPORTING
    monkeypatch.setattr(EngineStages, "look", lambda self, pid: (step, 0, 0))
    changes: list[list[tuple[str, str]]] = []

    def states() -> list[tuple[str, str]]:
        return [(each.place, each.state) for each in engines.set.versions()]

    engines.set.on_change = lambda: changes.append(states())
    (old,) = engines.run(PENNY)
    old.restarter._child = SimpleNamespace(pid=1)  # type: ignore[assignment]
    assert states() == [("engine-0", "starting")]
    since = engines.set.versions()[0].since
    assert engines.set.versions()[0].since == since
    step = SERVING
    assert states() == [("engine-0", "ready")]
    engines.set._watching[old.address] = None  # type: ignore[assignment]
    engines.set.watch(engines.read(PENNY).models)
    (new,) = engines.run(PENNY + "[engine]\nmax_num_seqs = 5\n")
    assert states() == [("engine-0", "serving"), ("engine-1", "starting")]
    old.restarter._child = None
    assert states()[0] == ("engine-0", "restarting")
    await engines.set.drop([new], "engine-1: it does not fit")
    *_, failed = engines.set.versions()
    assert (failed.place, failed.state) == ("engine-1", "failed")
    assert failed.problem == "engine-1: it does not fit"
    assert failed.version != engines.set.versions()[0].version
    engines.set.forget_failures()
    engines.run(PENNY + "[engine]\nmax_num_seqs = 6\n")
    engines.set._part_with_unwanted(engines.read(PENNY + "[engine]\nmax_num_seqs = 6\n").models)
    assert states() == [("engine-1", "starting"), ("engine-0", "draining")]
    assert [each[0] for each in changes] == [
        ("engine-0", "serving"),
        ("engine-0", "restarting"),
        ("engine-1", "starting"),
    ]


def test_an_engine_that_runs_on_has_the_version_of_the_settings_in_force(engines: Engines) -> None:
    engines.run(PENNY)
    before = engines.set.versions()[0].version
    more = engines.read(PENNY + "tool_call_parser = 'hermes'\n").models
    for address in engines.set._engines:
        engines.set._watching[address] = None  # type: ignore[assignment]
    engines.set.watch(more)
    assert engines.set.versions()[0].version not in ("", before)


def test_only_an_engine_that_never_served_is_given_up(engines: Engines) -> None:
    (engine,) = engines.run(PENNY)
    restarter: Restarter = engine.restarter
    assert restarter.is_final(2) and not restarter.is_final(1)
    engine.is_ready = True
    assert not restarter.is_final(2)


def test_replicas_come_beside_and_the_last_go_first(engines: Engines) -> None:
    """Those that run stay as they are."""
    (old,) = engines.run(PENNY + OTHER.replace("other", "o"))[:1]
    grown = PENNY + "replicas = 3\n" + OTHER.replace("other", "o")
    second, third = engines.run(grown)
    assert [number(each) for each in (old, second, third)] == [0, 2, 3]
    assert [each.record for each in (old, second, third)] == [1, 2, 3]
    settings = engines.read(grown)
    assert addresses(settings)["penny"] == "engine-0.sock engine-2.sock engine-3.sock"
    alone = EngineOptions().kv_cache_fraction
    assert [each.options.kv_cache_fraction for each in (old, second)] == [alone / 2, alone / 4]
    for address in engines.set._engines:
        engines.set._watching[address] = None  # type: ignore[assignment]
    engines.set.watch(settings.models)
    assert old.options == third.options, "its next start gives it its share"
    assert (old.name, third.name) == ("penny/0", "penny/3")
    fewer = engines.read(PENNY + "replicas = 2\n" + OTHER.replace("other", "o"))
    assert addresses(fewer)["penny"] == "engine-0.sock engine-2.sock"
    engines.set._drain_marks.mark(2)
    drained = engines.read(PENNY + "replicas = 2\n" + OTHER.replace("other", "o"))
    assert addresses(drained)["penny"] == "engine-0.sock engine-3.sock", "who is drained goes first"
    engines.set._drain_marks.remove(2)
    gone = engines.set._part_with_unwanted(fewer.models)
    assert gone == [third] and third.look().state == "draining"
    other = engines.read(PENNY + "replicas = 2\n[engine]\nmax_num_seqs = 5\n")
    assert addresses(other)["penny"] == "engine-4.sock engine-5.sock", "all of them are others"


async def test_a_conductor_that_does_not_start_at_first_is_tried_again(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarter, "FIRST_BACKOFF_S", 0.0)
    started = asyncio.Event()

    class Started:
        """A process that runs until it is stopped."""

        async def wait(self) -> int:
            return await asyncio.Future[int]()

        async def stop(self, timeout_s: float) -> None:
            return

    def spawn(*_: object, **__: object) -> Started:
        if not failures:
            failures.append(OSError("no process is to be had"))
            raise failures[0]
        started.set()
        return Started()

    failures: list[OSError] = []
    monkeypatch.setattr(beside_engines, "spawn", spawn)
    place, settings = ConductorPlace(Home(engines.folder / "home")), engines.read(PENNY)
    await place.follow(["unix:/a", "unix:/b"], settings)
    assert failures and place.restarter is not None and place.restarter.child is None
    async with asyncio.timeout(30):
        await started.wait()
    await place.follow([], settings)
    assert place.restarter is None


def own_host() -> str:
    """Return an address of the loopback that no other test process has."""
    high, low = divmod(os.getpid() % 65_000, 256)
    return f"127.77.{high}.{low}"


def with_places(folder: Path, host: str, joined: int) -> Settings:
    text = f'[fleet]\njoin_listen = "tcp:{host}:9400"\n{PENNY}'
    text += f"joined = {joined}\n" if joined else ""
    (folder / "tollgate.toml").write_text(text)
    return load({"config": folder / "tollgate.toml", "home": folder / "home"}, {})


async def until_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_engines_are_lent_while_settings_want_that(tmp_path: Path) -> None:
    home, config = Home(tmp_path / "home"), tmp_path / "tollgate.toml"
    home.create()
    place = LenderPlace(home)

    async def follow(cell: str) -> None:
        config.write_text(PENNY + cell)
        settings = load({"config": config, "home": home.root}, {})
        await place.follow(settings.models, settings)

    lending = '[cell]\nname = "us"\n[[cell.peer]]\nname = "eu"\n'
    lending += f'lend_to = "tcp:127.0.0.1:9"\ntoken_file = "{tmp_path}/none"\n'
    await follow("")
    assert place.restarter is None and not home.lending_config.exists()
    try:
        await follow(lending)
        log = home.logs / "lend.log"
        await until_true(lambda: log.exists() and "is not lent to eu" in log.read_text())
        assert f"{tmp_path}/none: No such file or directory" in log.read_text()
        assert place.restarter is not None
        first = place.restarter.child
        await follow(lending.replace("127.0.0.1:9", "127.0.0.1:10"))
        assert place.restarter.child is first, "it takes up other settings"
        await follow("")
        assert place.restarter is None and first is not None and first.poll() is not None
    finally:
        await place.stop()


async def test_it_runs_while_some_may_join_and_takes_up_how_many(tmp_path: Path) -> None:
    home, host = Home(tmp_path / "home"), own_host()
    home.create()
    place = RelayPlace(home)
    await place.follow(with_places(tmp_path, host, 0))
    assert place.restarter is None and not home.join.exists(), "nobody may join"
    try:
        await place.follow(with_places(tmp_path, host, 1))
        log = home.logs / "join.log"
        assert place.restarter is not None
        await until_true(lambda: "engines may join" in log.read_text())
        first = place.restarter.child
        await place.follow(with_places(tmp_path, host, 2))
        [model] = read_config(home.join_config).models
        assert [each.replica for each in model.places] == ["penny/1000", "penny/1001"]
        with socket.create_server(("127.78.0.1", 0)) as taken:
            other = f"127.78.0.1:{taken.getsockname()[1]}"
            settings = with_places(tmp_path, host, 2)
            fleet = msgspec.structs.replace(settings.fleet, join_listen=f"tcp:{other}")
            with pytest.raises(SettingsError, match="fleet.join_listen: .* already in use"):
                await place.follow(msgspec.structs.replace(settings, fleet=fleet))
        assert place.restarter.child is first and first is not None and first.poll() is None
    finally:
        await place.stop()
    assert first.poll() is not None
    with socket.create_server((host, 9400)):
        pass
