"""A version's digest is of what it answers with, and each file is read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.options import EngineOptions
from gateway.registry import digests
from gateway.registry.digests import FileDigests, digest_of
from gateway.settings.models import AdapterConfig, ModelConfig, ReplicaConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "weights"
    made.mkdir()
    for name in ("config.json", "tokenizer.json", "model-00001.safetensors", "README.md"):
        (made / name).write_text(name)
    return made


def test_it_changes_with_each_file_that_decides_an_answer(folder: Path) -> None:
    files, model = FileDigests(), ModelConfig(name="m", path=folder)
    before = digest_of(model, files)
    for name in ("config.json", "tokenizer.json", "model-00001.safetensors"):
        (folder / name).write_text("other")
        assert digest_of(model, files) != before, name
        (folder / name).write_text(name)
    (folder / "README.md").write_text("other")
    assert digest_of(model, FileDigests()) == before


def test_its_name_and_size_say_nothing_and_its_numbers_do(folder: Path, tmp_path: Path) -> None:
    os.symlink(folder, tmp_path / "same")
    files = FileDigests()
    before = digest_of(ModelConfig(name="m", path=folder), files)
    same = ModelConfig(
        name="n", path=tmp_path / "same", engine_options=EngineOptions(max_num_seqs=2)
    )
    assert digest_of(same, files) == before
    int8 = ModelConfig(name="m", path=folder, engine_options=EngineOptions(quantization="int8"))
    assert digest_of(int8, files) != before


def test_an_adapter_counts_beside_its_model(folder: Path, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text("{}")
    (lora / "adapter_model.safetensors").write_text("one")
    model = ModelConfig(
        name="m",
        path=folder,
        adapters=(AdapterConfig(name="a", path=lora), AdapterConfig(name="b", path=folder)),
    )
    found = {digest_of(model, FileDigests(), name) for name in ("", "a", "b")}
    assert len(found) == 3
    (lora / "adapter_model.safetensors").write_text("two")
    assert digest_of(model, FileDigests(), "a") not in found


def test_an_upstream_is_where_it_is_and_what_it_is_called_there() -> None:
    def upstream(model: str, weight: int = 1) -> ModelConfig:
        return ModelConfig(
            name="m",
            replicas=(ReplicaConfig(upstream="http://a/v1", upstream_model=model, weight=weight),),
        )

    first, heavy, second = (
        digest_of(each, FileDigests()) for each in (upstream("x"), upstream("x", 2), upstream("y"))
    )
    assert first == heavy != second


def test_a_file_is_read_once_while_it_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    whole = digests.digest_of_file

    def digest_of_file(path: Path) -> str:
        read.append(path)
        return whole(path)

    monkeypatch.setattr(digests, "digest_of_file", digest_of_file)
    files, model = FileDigests(), ModelConfig(name="m", path=folder)
    assert digest_of(model, files) == digest_of(model, files)
    assert len(read) == 3
