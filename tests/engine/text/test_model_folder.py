"""Checks that a folder which cannot be served is told in one line that names the file and says what
to do, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.text.model_folder import check_model_folder, check_tokenizer

PENNY = Path(__file__).resolve().parents[3] / "models/penny"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
Damage = Callable[[Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", SINGLE):
        shutil.copy(PENNY / name, made / name)
    return made


def writes(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def cuts(name: str, size: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def has_weights_as(name: str) -> Damage:
    return lambda folder: (folder / SINGLE).rename(folder / name)


def shards(*files: str) -> Damage:
    """An index of these files, of which the first is there."""

    def damage(folder: Path) -> None:
        (folder / SINGLE).rename(folder / files[0])
        located = {f"tensor.{number}": file for number, file in enumerate(files)}
        (folder / INDEX).write_text(json.dumps({"weight_map": located}))

    return damage


def becomes_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def is_a_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "gone": (shutil.rmtree, "F does not exist: give the folder of a model in Hugging Face's form"),
    "file": (becomes_file, "F is a file: give the folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "F has no config.json: give the folder"),
    "config": (writes("config.json", b"{no"), "F/config.json is not a JSON object: JSON is mal"),
    "config list": (writes("config.json", b"[1]"), "F/config.json is not a JSON object: Expected"),
    "config empty": (writes("config.json", b""), "F/config.json is not a JSON object: Input data"),
    "config of what": (writes("config.json", b"{}"), "F/config.json has no field 'architectures'"),
    "config pointer": (writes("config.json", POINTER), "F/config.json is a pointer of Git LFS"),
    "config folder": (is_a_folder("config.json"), "F/config.json cannot be read: Is a directory"),
    "tokenizer": (
        writes("tokenizer.json", b'{"version": "1.0", "model": {'),
        "F/tokenizer.json is not a JSON object: Input data was truncated",
    ),
    "tokenizer of what": (
        writes("tokenizer.json", b"{}"),
        "F/tokenizer.json is no tokenizer: it has no field 'model'",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        "F has no tokenizer.json: transformers' AutoTokenizer",
    ),
    "sentencepiece": (
        lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"),
        "F has no tokenizer.json (tokenizer.model is not read): transformers' AutoTokenizer",
    ),
    "no weights": (lambda f: (f / SINGLE).unlink(), f"F has no weights ({SINGLE} or {INDEX})"),
    "pickle": (
        has_weights_as("pytorch_model.bin"),
        "F has its weights as pytorch_model.bin alone; only safetensors are read: transformers'",
    ),
    "pickles": (has_weights_as("pytorch_model-00001-of-00002.bin"), "F has its weights as pytorch"),
    "gguf": (has_weights_as("q4.gguf"), "F has its weights as q4.gguf alone"),
    "cut": (cuts(SINGLE, 5_000_000), f"F/{SINGLE} is cut off: it has 5000000 of 10957216 bytes"),
    "cut header": (cuts(SINGLE, 100), f"F/{SINGLE} is cut off in its header: download it again"),
    "nothing": (cuts(SINGLE, 0), f"F/{SINGLE} is not a safetensors file (0 bytes)"),
    "noise": (writes(SINGLE, b"\xff" * 99), f"F/{SINGLE} is not a safetensors file (99 bytes)"),
    "header": (
        writes(SINGLE, (2).to_bytes(8, "little") + b"[]"),
        f"F/{SINGLE} is not a safetensors file: Expected `object`",
    ),
    "deep header": (
        writes(SINGLE, (30_000).to_bytes(8, "little") + b'{"a":{' + b'"a":{' * 5_998 + b"    "),
        f"F/{SINGLE} is not a safetensors file: maximum recursion depth",
    ),
    "pointer": (writes(SINGLE, POINTER), f"F/{SINGLE} is a pointer of Git LFS, not the file: run"),
    "shards": (
        shards("a.safetensors", "b.safetensors", "c.safetensors"),
        f"F lacks 2 of the 3 files that {INDEX} names (b.safetensors, c.safetensors): download",
    ),
    "index": (writes(INDEX, b'{"weight_map": '), f"F/{INDEX} is not a JSON object: Input data"),
    "index of what": (writes(INDEX, b"{}"), f"F/{INDEX} has no 'weight_map' from tensors to"),
    "index name": (
        writes(INDEX, b'{"weight_map": {"a": "%b"}}' % (b"b" * 5000)),
        f"F/{INDEX} names a file of 5000 characters",
    ),
    "index type": (writes(INDEX, b'{"weight_map": {"a": 1}}'), f"F/{INDEX} has no 'weight_map'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_is_told_in_one_line(folder: Path, damage: str) -> None:
    do, said = DAMAGES[damage]
    do(folder)
    with pytest.raises(ConfigError) as refused:
        check_model_folder(folder)
        check_tokenizer(folder)
    message = refused.value.message.replace(str(folder), "F")
    assert message.startswith(said) and "\n" not in message


def test_a_file_that_may_not_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read all: the kernel's answer to others is played."""
    real = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == hidden:
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    for hidden in ("config.json", "tokenizer.json", SINGLE):
        with pytest.raises(ConfigError, match=f"/{hidden} cannot be read: Permission denied"):
            check_model_folder(folder)


def test_a_folder_that_is_whole_is_taken(folder: Path) -> None:
    check_model_folder(folder)
    check_tokenizer(folder)
    shards("only.safetensors")(folder)
    check_model_folder(folder)
    (folder / "only.safetensors").unlink()
    check_model_folder(folder, weights=False)
    (folder / "tokenizer.json").unlink()
    check_model_folder(folder, weights=False)
