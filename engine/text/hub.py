"""A model named `org/name` becomes a folder: fetched from a hub once, and kept in its cache.

Knows neither torch nor what the files mean.

What is fetched are files of the repository's top folder only, and POOLING_FILE: weights in
safetensors, as many as the index names, JSON, and the texts of tokenizer and chat template. Never a
pickle or a program.
"""

from __future__ import annotations

import glob
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError
from engine.text import hub_weights
from engine.text.hub_weights import MEGABYTE, Tell, Transfer

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODULES_FILE, POOLING_FILE = "modules.json", "1_Pooling/config.json"
"""How a model embeds, as sentence-transformers says it."""
TEXTS = re.compile(rf"[^/]+\.(json|jinja)|merges\.txt|vocab\.txt|{re.escape(POOLING_FILE)}")
"""Fetched beside the weights. None is a program: a chat template is rendered in a sandbox."""
GIB = 1 << 30


class FetchedModel(NamedTuple):
    """A model in the hub's cache."""

    folder: Path
    commit: str


class LineOnTerminal:
    """Draws on stderr how far a download is, if that is a terminal."""

    def __init__(self, what: str) -> None:
        self._what, self._on_terminal = what, sys.stderr.isatty()

    def __call__(self, now: Transfer) -> None:
        if not self._on_terminal:
            return
        size = f"{now.done / MEGABYTE:.0f} of {now.total / MEGABYTE:.0f} MB"
        end = "\n" if now.done >= now.total else ""
        line = f"\r{self._what}: {now.done / now.total:4.0%}, {size}, {now.text()}\x1b[K{end}"
        print(line, end="", file=sys.stderr, flush=True)


def names_a_repository(model: str | Path) -> bool:
    """Whether `model` is `org/name` and no folder of that name is there."""
    return NAME.fullmatch(str(model)) is not None and not Path(model).exists()


def fetch(
    name: str, *, revision: str | None = None, weights: bool = True, tell: Tell | None = None
) -> FetchedModel:
    """The folder of `name` at `revision` (a branch, a tag or a commit; None: the default branch).

    weights: False leaves them out: a gateway needs the texts alone. tell: it is called as bytes of
    weights come, by any thread; None: on a terminal a line is drawn. A commit that is in the cache
    whole is taken from there without a word to the hub. While the hub cannot be reached, a branch
    is what it was last. Raises ConfigError: one line that says what is the matter.
    """
    from huggingface_hub import HfApi, errors

    at = name if revision is None else f"{name}@{revision}"
    with hub_errors_explained(name, revision):
        commit = HfApi().resolve_revision(name, revision=revision).resolved
        try:
            return _cached(name, commit, weights)
        except errors.LocalEntryNotFoundError as error:
            log.debug("%s is not in the cache whole: %s", at, _one_line(error))
        return _download(name, commit, weights, tell or LineOnTerminal(at))


@contextmanager
def hub_errors_explained(
    name: str, revision: str | None, *, hub: str | None = None
) -> Iterator[None]:
    """Turn what the hub's library raises into a ConfigError of one line. `hub`: its address; None:
    that of the environment, HF_ENDPOINT."""
    from huggingface_hub import constants, errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its HTTP library's

    at = name if revision is None else f"{name}@{revision}"
    hub = hub or constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        what = f"{at} is gated: accept its terms on {hub}/{name} and set HF_TOKEN"
        raise ConfigError(what) from error
    except errors.RepositoryNotFoundError as error:
        what = f"{name} is no folder here and no model on {hub} (a private one wants HF_TOKEN)"
        raise ConfigError(what) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision!r} on {hub}") from error
    except (errors.RevisionResolutionError, HTTPError, OSError) as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        what = offline or f"{hub}: {_one_line(error)}"
        raise ConfigError(
            f"{at} is no folder here, not whole in the cache, and cannot be fetched: {what}"
        ) from error


def _download(name: str, commit: str, weights: bool, tell: Tell) -> FetchedModel:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would log every request
    began = time.monotonic()
    info = HfApi().model_info(name, revision=commit, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def read_index() -> bytes:
        return Path(hf_hub_download(name, INDEX_FILE, revision=commit)).read_bytes()

    chosen = choose_files(f"{name}@{commit}", sizes, read_index if weights else None)
    shards = chosen.weights
    wanted = {*chosen.texts, *shards}
    total = sum(sizes[file] for file in wanted)
    log.info("fetching %s@%s: %d files, %.2f GiB", name, commit, len(wanted), total / GIB)
    if shards:
        hub_weights.download(name, commit, {shard: sizes[shard] for shard in shards}, tell)
    exactly = [glob.escape(file) for file in sorted(wanted)]
    folder = snapshot_download(name, revision=commit, allow_patterns=exactly)
    log.info("%s@%s is complete after %.1f s", name, commit, time.monotonic() - began)
    return FetchedModel(Path(folder), commit)


def _cached(name: str, commit: str, weights: bool) -> FetchedModel:
    """Raises LocalEntryNotFoundError when the cache lacks it, or a part of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # Which files make it whole is asked here: the library would want those of an allowed pattern.
    found = snapshot_download(name, revision=commit, local_files_only=True, allow_patterns=[])
    folder = Path(found)
    needed = ["config.json", "tokenizer.json"]
    if weights:
        index = folder / INDEX_FILE
        needed += shards_in(index.read_bytes(), index) if index.exists() else [SINGLE_FILE]
        modules = folder / MODULES_FILE
        if modules.exists() and Path(POOLING_FILE).parent.name in modules.read_text():
            needed.append(POOLING_FILE)
    for file in needed:
        if not (folder / file).exists():
            raise LocalEntryNotFoundError(f"{folder / file} is missing")
    return FetchedModel(folder, commit)


class ChosenFiles(NamedTuple):
    """The files of a repository that an engine reads."""

    texts: list[str]
    weights: list[str]


def choose_files(
    at: str, there: Collection[str], read_index: Callable[[], bytes] | None
) -> ChosenFiles:
    """Choose what an engine reads of the files that a repository has. `at`: its name for an error.
    `read_index`: returns the content of INDEX_FILE; None: no weights are chosen. Raises:
    ConfigError, if it is no model for this engine, and what `read_index` raises."""
    texts = sorted(file for file in there if TEXTS.fullmatch(file))
    if "config.json" not in texts:
        raise ConfigError(f"{at} has no config.json: it is no model for this engine")
    if read_index is None:
        return ChosenFiles(texts, [])
    shards = [SINGLE_FILE]
    if INDEX_FILE in there:
        shards = shards_in(read_index(), f"{at}/{INDEX_FILE}")
    _check_there(at, shards, there)
    return ChosenFiles(texts, shards)


def shards_in(index: bytes, at: str | Path) -> list[str]:
    """Return the files that an index names. Raises: ConfigError."""
    try:
        return sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{at} is no index of safetensors files: {error}") from error


def _check_there(at: str, shards: list[str], there: Collection[str]) -> None:
    """ConfigError unless every shard is there, as safetensors in the top folder."""
    for shard in shards:
        if shard in there and "/" not in shard and shard.endswith(".safetensors"):
            continue
        others = sorted(file for file in there if file.endswith((".bin", ".pt", ".pth", ".gguf")))
        only = f", only {', '.join(others[:3])}" if others else ""
        raise ConfigError(f"{at} has no weights in safetensors: {shard} is missing{only}")


def _one_line(error: Exception) -> str:
    """The cause counts where the library wrapped it in advice."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split()) or type(cause).__name__
