"""Compiled kernels on disk: what is damaged, or of another compiler or processor, is not found."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from engine.kernels.cpu.compiling import kernel_cache as module
from engine.kernels.cpu.compiling.kernel_cache import MANIFEST, PARTS, SOURCES, KernelCache


def made(cache: KernelCache, part: str = "rows") -> Path:
    with cache.locked(part), cache.replacing(part) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "code.nbc").write_bytes(b"machine code")
        (folder / "inner" / "code.nbi").write_bytes(b"index")
    return cache.folder / part


def test_a_part_is_found_when_it_is_whole(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert cache.find("rows") is None
    folder = made(cache)
    assert cache.find("rows") == folder and cache.find("linear") is None
    assert made(cache) == folder and cache.find("rows") == folder


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "more", "no manifest"])
def test_what_is_damaged_is_not_found(tmp_path: Path, damage: str) -> None:
    cache = KernelCache(tmp_path)
    file = made(cache) / "inner" / "code.nbc"
    match damage:
        case "truncated":
            os.truncate(file, 3)
        case "changed":
            file.write_bytes(b"Machine code")
        case "missing":
            file.unlink()
        case "more":
            (file.parent / "other.nbc").touch()
        case _:
            (tmp_path / "rows" / MANIFEST).unlink()
    assert cache.find("rows") is None
    made(cache)
    assert cache.find("rows") is not None


def test_what_was_not_finished_is_not_found(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    with pytest.raises(KeyboardInterrupt), cache.locked("rows"), cache.replacing("rows") as folder:
        (folder / "code.nbc").touch()
        raise KeyboardInterrupt
    assert cache.find("rows") is None and [*tmp_path.iterdir()] == [tmp_path / "rows.lock"]


def _make(path: Path) -> None:
    cache = KernelCache(path)
    with cache.locked("rows"):
        if cache.find("rows") is None:
            with (path / "made").open("a") as noted:
                noted.write("once\n")
            with cache.replacing("rows") as folder:
                (folder / "code.nbc").touch()


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_make, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (tmp_path / "made").read_text() == "once\n"
    assert KernelCache(tmp_path).find("rows") is not None


def test_another_processor_or_compiler_has_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = module._digest()
    assert here == module._digest()
    with monkeypatch.context() as patched:
        patched.setattr(llvm, "get_host_cpu_name", lambda: "another")
        assert module._digest() != here
    with monkeypatch.context() as patched:
        patched.setattr(module, "_numba_version", lambda: "0.0")
        assert module._digest() != here


def test_old_folders_are_forgotten(tmp_path: Path) -> None:
    for age in range(module.MAX_KEPT + 3):
        (tmp_path / f"cpu-{age}").mkdir()
        os.utime(tmp_path / f"cpu-{age}", (1000 - age, 1000 - age))
    module._forget_old(tmp_path, "cpu-0")
    assert sorted(int(each.name[4:]) for each in tmp_path.iterdir()) == [
        *range(module.MAX_KEPT + 1)
    ]


def test_each_module_with_kernels_is_in_one_part() -> None:
    with_kernels = {path.stem for path in SOURCES.glob("*.py") if "\n@cfunc" in path.read_text()}
    assert sorted(with_kernels) == sorted(name for names in PARTS.values() for name in names)
