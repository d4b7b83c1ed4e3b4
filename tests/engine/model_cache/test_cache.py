"""The cache on one machine: found by version, brought once, verified, bounded, and whole."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.model_cache import cache as cache_module
from engine.model_cache.cache import hold_if_cached, lock_of
from engine.model_cache.sources import parse_source
from engine.model_files import version_of
from engine.text import hub_weights
from tests.engine.model_cache.remote import FILES, SOURCE, Remote, cache_of, tell

OTHER = parse_source("s3://bucket/other")
WEIGHTS = "model.safetensors"
VERSION = version_of({name: hashlib.sha256(each).hexdigest() for name, each in FILES.items()})
SIZE = sum(map(len, FILES.values()))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_weights, "RETRY_AFTER_S", 0.0)


def partial_files(root: Path) -> list[str]:
    return sorted(each.name for each in (root / "partial").rglob("*") if each.is_file())


def test_a_model_is_brought_once_and_found_by_its_version(tmp_path: Path) -> None:
    remote = Remote()
    cache = cache_of(tmp_path, remote)
    found = cache.fetch(SOURCE, tell)
    assert (found.version, found.state) == (VERSION, remote.state)
    assert {each.name: each.read_bytes() for each in found.folder.iterdir()} == FILES
    assert found.folder == tmp_path / "models" / VERSION.removeprefix("sha256:")
    assert not os.access(found.folder / WEIGHTS, os.W_OK) or os.geteuid() == 0
    assert partial_files(tmp_path) == []
    reads = len(remote.reads)
    assert cache.fetch(SOURCE, tell).folder == found.folder
    assert len(remote.reads) == reads, "the source is asked for its state alone"
    away = cache_of(tmp_path)
    assert away.fetch(SOURCE, tell, version=VERSION).folder == found.folder
    with pytest.raises(ConfigError, match="s3://bucket/model cannot be fetched: nobody answers"):
        away.fetch(SOURCE, tell)


def test_the_version_is_what_sha256sum_prints() -> None:
    lines = [f"{hashlib.sha256(FILES[name]).hexdigest()}  {name}\n" for name in sorted(FILES)]
    assert f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}" == VERSION


@pytest.mark.parametrize("sums", [True, False])
def test_another_version_is_refused_and_nothing_is_kept(tmp_path: Path, sums: bool) -> None:
    remote, wanted = Remote(sums=sums), "sha256:" + "0" * 64
    cache = cache_of(tmp_path, remote)
    with pytest.raises(ConfigError, match=f"model is version {VERSION}, not {wanted}"):
        cache.fetch(SOURCE, tell, version=wanted)
    assert cache.entries() == [] and partial_files(tmp_path) in (
        [],
        [each for each in partial_files(tmp_path) if each.endswith(".json")],
    )
    assert sums == (remote.reads == []), "where the sums are known nothing is fetched"


def test_a_source_that_says_no_sums_wants_a_version(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, Remote(sums=False))
    with pytest.raises(
        ConfigError, match="nothing says what config.json has to be: put SHA256SUMS"
    ):
        cache.fetch(SOURCE, tell)
    assert cache.fetch(SOURCE, tell, version=VERSION).version == VERSION


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    remote = Remote()
    good = remote.contents[WEIGHTS]
    remote.contents[WEIGHTS] = good[:-1] + bytes([good[-1] ^ 1])
    cache = cache_of(tmp_path, remote)
    with pytest.raises(ConfigError, match=f"{WEIGHTS} is not what its checksum says"):
        cache.fetch(SOURCE, tell)
    assert not list(tmp_path.rglob(WEIGHTS)), "nothing of it is kept"
    assert [each.version for each in cache.entries()] == [""]
    remote.contents[WEIGHTS] = good
    assert cache.fetch(SOURCE, tell).version == VERSION


def test_a_download_goes_on_where_it_stopped(tmp_path: Path) -> None:
    remote = Remote()
    remote.cuts[WEIGHTS] = [3000] * (hub_weights.MAX_ATTEMPTS + 1)
    cache = cache_of(tmp_path, remote)
    with pytest.raises(ConfigError, match="cannot be fetched: the line was cut"):
        cache.fetch(SOURCE, tell)
    assert (WEIGHTS, 0) in remote.reads and (WEIGHTS, 3000) in remote.reads
    remote.reads.clear()
    assert cache.fetch(SOURCE, tell).version == VERSION
    assert [each for each in remote.reads if each[0] == WEIGHTS] == [(WEIGHTS, 3000)]


def test_what_came_before_and_is_damaged_comes_anew(tmp_path: Path) -> None:
    remote = Remote()
    remote.cuts[WEIGHTS] = [3000] * (hub_weights.MAX_ATTEMPTS + 1)
    cache = cache_of(tmp_path, remote)
    with pytest.raises(ConfigError):
        cache.fetch(SOURCE, tell)
    (part,) = (tmp_path / "partial").rglob(WEIGHTS)
    part.write_bytes(b"x" * 3000)
    remote.reads.clear()
    assert cache.fetch(SOURCE, tell).version == VERSION
    assert [each for each in remote.reads if each[0] == WEIGHTS] == [(WEIGHTS, 3000), (WEIGHTS, 0)]


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote()
    cache = cache_of(tmp_path, remote)

    def is_full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", is_full)
        with pytest.raises(ConfigError) as refused:
            cache.fetch(SOURCE, tell)
    assert refused.value.message == f"model cache {tmp_path}: the disk is full"
    assert all(not each.version for each in cache.entries())
    assert cache.fetch(SOURCE, tell).version == VERSION


def test_a_disk_without_the_room_is_told_before_anything_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote()
    usage = cache_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: usage._replace(free=SIZE - 1))
    with pytest.raises(ConfigError, match="the disk has 0.00 GiB free"):
        cache_of(tmp_path, remote).fetch(SOURCE, tell)
    assert remote.reads == []


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refused:
        cache_of(tmp_path / "file" / "cache", Remote()).fetch(SOURCE, tell)
    assert refused.value.message == f"model cache {tmp_path}/file/cache: Not a directory"


def test_what_nobody_uses_gives_way(tmp_path: Path) -> None:
    first = Remote()
    others = [
        Remote({**FILES, WEIGHTS: bytes([n]) * 9000}, source=parse_source(f"s3://bucket/m{n}"))
        for n in range(3)
    ]
    cache = cache_of(tmp_path, first, *others, max_bytes=3 * SIZE)
    used = cache.fetch(SOURCE, tell)
    held = hold_if_cached(used.folder)
    assert held is not None
    used.hold.close()
    for at, remote in enumerate(others):
        found = cache.fetch(remote.source, tell)
        found.hold.close()
        os.utime(lock_of(found.folder), (at, at))
    sources = [each.source for each in cache.entries()]
    assert sources == ["s3://bucket/m1", "s3://bucket/m2", "s3://bucket/model"]
    assert [each.in_use for each in cache.entries()] == [False, False, True]
    big = Remote({**FILES, WEIGHTS: b"x" * (2 * SIZE + 1000)}, source=OTHER)
    with pytest.raises(ConfigError, match="of which 0.00 GiB are in use: allow it more"):
        cache_of(tmp_path, big, max_bytes=3 * SIZE).fetch(OTHER, tell)
    assert [each.source for each in cache.entries()] == [str(SOURCE)], "the one in use stays"
    with pytest.raises(ConfigError, match=f"{used.version} is in use"):
        cache.remove(used.version)
    held.close()
    assert cache.remove(used.version) == SIZE
    assert cache.entries() == [] and not used.folder.exists()
    with pytest.raises(ConfigError, match="has no sha256"):
        cache.remove(used.version)


def test_a_damaged_model_is_fetched_again(tmp_path: Path) -> None:
    remote = Remote()
    cache = cache_of(tmp_path, remote)
    found = cache.fetch(SOURCE, tell)
    found.hold.close()
    weights = found.folder / WEIGHTS
    weights.chmod(0o600)
    weights.touch()
    same = cache.fetch(SOURCE, tell, version=VERSION)
    assert same.folder == found.folder, "the content counts"
    weights.write_bytes(b"y" * len(FILES[WEIGHTS]))
    with pytest.raises(ConfigError, match="is damaged, and in use: end who uses it"):
        cache.fetch(SOURCE, tell, version=VERSION)
    same.hold.close()
    again = cache.fetch(SOURCE, tell, version=VERSION)
    assert (again.folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.parametrize("left", ["folder", "record"])
def test_what_a_killed_process_leaves_is_no_model(tmp_path: Path, left: str) -> None:
    remote = Remote()
    cache = cache_of(tmp_path, remote)
    found = cache.fetch(SOURCE, tell)
    found.hold.close()
    if left == "folder":
        cache_module.record_of(found.folder).unlink()
    else:
        found.folder.rename(tmp_path / "away")
    assert cache.entries() == []
    assert cache.fetch(SOURCE, tell).folder == found.folder
    assert [each.version for each in cache.entries()] == [VERSION]


def test_the_same_files_of_two_sources_are_one_model(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, Remote(), Remote(source=OTHER))
    assert cache.fetch(SOURCE, tell).folder == cache.fetch(OTHER, tell).folder
    assert len(cache.entries()) == 1 and partial_files(tmp_path) == []


def test_a_folder_outside_is_not_held(tmp_path: Path) -> None:
    assert hold_if_cached(tmp_path) is None
    (tmp_path / "models" / "penny").mkdir(parents=True)
    assert hold_if_cached(tmp_path / "models" / "penny") is None
