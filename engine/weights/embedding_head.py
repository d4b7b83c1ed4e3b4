"""Reads what a checkpoint says about embeddings: the modules that sentence-transformers puts behind
it.

Reads `modules.json` and the pooling's config.json; a folder without them is a language model, whose
last hidden state serves, or an encoder, whose mean does, brought to unit length. What is not built
here is refused: another vector would look like one, too.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import Pooling
from engine.errors import ConfigError, UnsupportedModel
from engine.models.config import EmbeddingHead

MODULES_FILE = "modules.json"
POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""As the setting's name says it behind `pooling_mode_`, or the value of `pooling_mode`."""
MODE = "pooling_mode_"


class Module(msgspec.Struct):
    """An entry of MODULES_FILE, as far as it is read."""

    type: str
    """A class by its import path, which differs between versions but for its end."""
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def read_embedding_head(folder: Path, unsaid: Pooling = "last") -> EmbeddingHead:
    """`unsaid`: of a folder without MODULES_FILE. Raises ConfigError (broken), UnsupportedModel
    (not built here), naming file and field."""
    path = folder / MODULES_FILE
    if not path.exists():
        return EmbeddingHead(pooling=unsaid)
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[Module])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from error
    kinds = [module.kind for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(
            f"{path}: modules {', '.join(kinds) or 'none'} are not supported: "
            "a Transformer, a Pooling and at most a Normalize are"
        )
    transformer, pooling = modules[:2]
    if transformer.path not in ("", "."):
        raise UnsupportedModel(f"{path}: a Transformer in {transformer.path!r} is not supported")
    settings = folder / pooling.path / "config.json"
    return EmbeddingHead(pooling=_pooling(settings), normalise=len(modules) == 3)


def _pooling(path: Path) -> Pooling:
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error
    named = settings.get("pooling_mode")
    modes = [
        name.removeprefix(MODE) for name, on in settings.items() if on is True and MODE in name
    ]
    if named is not None:
        modes = [str(name) for name in named] if isinstance(named, list) else [str(named)]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        found = " and ".join(modes) or "nothing"
        raise UnsupportedModel(f"{path}: pooling of {found} is not supported (lasttoken, mean)")
    pooling = POOLINGS[modes[0]]
    if pooling == "mean" and settings.get("include_prompt") is False:
        raise UnsupportedModel(f"{path}: include_prompt false is not supported")
    return pooling
