"""A model's version is named by its settings, and a home knows since when it has each."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.installation.model_versions import VersionHistory, version_of, weights_of
from gateway.settings.load import load
from gateway.settings.models import ModelConfig

PENNY = '[[model]]\nname = "penny"\npath = "models/penny"\n'
FAR = '[[model]]\nname = "far"\nupstream = "https://user:pass@far.example/v1"\n'


def models(folder: Path, text: str) -> dict[str, ModelConfig]:
    path = folder / "tollgate.toml"
    path.write_text(text)
    found = load({"config": path, "home": folder / "home"}, {})
    return {each.name: each for each in found.models}


def test_a_version_is_the_same_wherever_its_model_stands(tmp_path: Path) -> None:
    """Neither the processes that it has are part of it, nor with how many it shares the memory."""
    alone = models(tmp_path, PENNY)["penny"]
    beside = models(tmp_path, FAR + PENNY + PENNY.replace("penny", "other", 1))["penny"]
    assert alone.engines != beside.engines
    assert version_of(alone) == version_of(beside)
    twice = models(tmp_path, PENNY + "replicas = 2\n")["penny"]
    assert version_of(alone) == version_of(twice)


@pytest.mark.parametrize(
    "more",
    [
        "[engine]\nmax_num_seqs = 5\n",
        "[engine]\nkv_cache_fraction = 0.3\n",
        "[[model.adapter]]\nname = 'law'\npath = 'models/penny'\n",
        "tool_call_parser = 'hermes'\n",
    ],
)
def test_other_settings_are_another_version(tmp_path: Path, more: str) -> None:
    assert version_of(models(tmp_path, PENNY)["penny"]) != version_of(
        models(tmp_path, PENNY + more)["penny"]
    )


def test_weights_are_named_by_their_folder_or_their_commit(tmp_path: Path) -> None:
    penny = models(tmp_path, PENNY)["penny"]
    assert weights_of(penny) == str(Path("models/penny").absolute())
    fetched = replace(penny, repository="org/name", path=Path("/hub/snapshots/0123456789abcdef"))
    assert weights_of(fetched) == "org/name@0123456789ab"
    assert weights_of(models(tmp_path, FAR)["far"]) == ""


def test_a_home_knows_since_when_it_has_a_version(tmp_path: Path) -> None:
    now = 1000.0
    history = VersionHistory(lambda: now)
    [first] = history.of(models(tmp_path, FAR).values())
    assert (first.model, first.state, first.since) == ("far", "serving", 1000)
    assert first.place == "https://far.example", "without who asks"
    now = 2000.0
    assert history.of(models(tmp_path, FAR).values()) == [first]
    [second] = history.of(models(tmp_path, FAR + "context_window = 5\n").values())
    assert second.since == 2000 and second.version != first.version
