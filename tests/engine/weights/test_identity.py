"""A checkpoint's name is the same for the same model, and another where the model is another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.weights.identity import identities_of, identity_of

FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")
PENNY = Path(__file__).resolve().parents[3] / "models" / "penny"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in FILES:
        shutil.copy(PENNY / name, folder / name)
    return folder


def weights_of(folder: Path, at: int) -> None:
    """Change one number of the second tensor."""
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[1]
    tensors[name].view(-1)[at] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def text_of(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(path.read_text() + " ")

    return change


CHANGES: dict[str, Callable[[Path], None]] = {
    "first number": lambda folder: weights_of(folder, 0),
    "last number": lambda folder: weights_of(folder, -1),
    "tokenizer": text_of("tokenizer.json"),
    "config": text_of("config.json"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_model_has_another_name(change: Callable[[Path], None], copy: Path) -> None:
    assert identity_of(copy) == identity_of(PENNY)
    (copy / "chat_template.jinja").write_text("another")
    assert identity_of(copy) == identity_of(PENNY), "it decides nothing of what comes behind"
    before = load_file(copy / "model.safetensors")
    change(copy)
    assert identity_of(copy) != identity_of(PENNY)
    assert before.keys() == load_file(copy / "model.safetensors").keys()


def test_an_adapter_has_a_name_of_its_own_over_its_model(copy: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    plain = identities_of(EngineConfig(model=copy))
    both = identities_of(EngineConfig(model=copy, adapters={"a": adapter}))
    assert both[""] == plain[""] != both["a"]
    text_of("config.json")(copy)
    assert identities_of(EngineConfig(model=copy, adapters={"a": adapter}))["a"] != both["a"]


def test_weights_that_are_drawn_have_the_name_of_their_seed(copy: Path) -> None:
    names = [
        identities_of(EngineConfig(model=copy, load_format="dummy", seed=seed))[""]
        for seed in (1, 1, 2)
    ]
    assert names[0] == names[1] != names[2]
