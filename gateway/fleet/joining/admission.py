"""Decides whether an engine that came may be a replica: it has to be the same in all that makes a
difference to clients. Pure, but for the hashes of the home's own files.

Each refusal is one line, for whoever started the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from threading import Lock

import msgspec

from engine.model_files import contents_of
from engine.options import EngineOptions
from engine.protocol import PROTOCOL_VERSION, EngineRole
from engine.transport.join_messages import (
    ADAPTER,
    JOIN_VERSION,
    MODEL,
    EngineIdentity,
    Introduction,
    Names,
    options_of,
)
from gateway.fleet.joining.tokens import StoredToken
from gateway.settings.file import decode_path
from gateway.settings.models import ModelConfig

MAX_CLOCK_SKEW_S = 300.0
SHOWN_DIGITS = 12


class JoinPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that an engine of another machine may be. `address`: where the processes of this
    home find it while it is there. `cell`: the other cell that lends it; empty: it is of this
    home."""

    replica: str
    address: str
    cell: str = ""
    role: EngineRole = "both"


class JoinableModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that engines may join, as the settings have it."""

    name: str
    folders: dict[str, Path]
    """The home's own copy, and those of adapters, as `engine.model_files` names them."""
    options: EngineOptions
    places: tuple[JoinPlace, ...]
    versions: Names = {}
    """The versions that files have to be, by the name of their folder, where the settings say."""
    sources: Names = {}
    """The sources of files, `hf:...` or `s3://...`, by the name of their folder."""

    @classmethod
    def of(cls, model: ModelConfig) -> JoinableModel:
        assert model.path is not None
        adapters = {f"{ADAPTER}{each.name}": each for each in model.adapters if each.path}
        paths = {name: each.path for name, each in adapters.items() if each.path}
        versions = {name: each.version for name, each in adapters.items() if each.version}
        sources = {name: each.source for name, each in adapters.items() if each.source}
        if model.version is not None:
            versions[MODEL] = model.version
        if (source := source_of(model)) is not None:
            sources[MODEL] = source
        return cls(
            name=model.name,
            folders={MODEL: model.path, **paths},
            versions=versions,
            sources=sources,
            options=model.engine_options,
            places=(
                *(
                    JoinPlace(
                        replica=model.replica_name(address),
                        address=address,
                        role=model.role_of(address),
                    )
                    for address in model.joined
                ),
                *(
                    JoinPlace(
                        replica=model.replica_name(each.address),
                        address=each.address,
                        cell=each.cell,
                    )
                    for each in model.borrowed
                ),
            ),
        )


def source_of(model: ModelConfig) -> str | None:
    """Return where an engine fetches the model from when no machine of the home sends it."""
    if model.repository is None:
        return model.source
    return f"hf:{model.repository}" + (f"@{model.revision}" if model.revision else "")


class JoinConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the process that engines come to, as `tollgate up` writes them."""

    models: tuple[JoinableModel, ...]
    bytes_per_s: int = 0
    """The bound on what all engines together are sent of models' files. 0: nothing."""
    round_trips: Path | None = None
    """The file in which it is kept how far engines of other cells are; None: there are none."""


def read_config(path: Path) -> JoinConfig:
    """Read what `write_config` wrote. Raises: OSError, msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=JoinConfig, dec_hook=decode_path)


def write_config(path: Path, config: JoinConfig) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(config, enc_hook=str))
    fresh.rename(path)


class HomeFiles:
    """The hashes of the home's own copies of models, which are made once."""

    def __init__(self, hashes: Path) -> None:
        self._hashes = hashes
        self._lock = Lock()

    def of(self, model: JoinableModel) -> Names:
        """Blocks while files are read. Raises: OSError."""
        with self._lock:  # of engines that come at once the first hashes for all
            return contents_of(model.folders, self._hashes)


def refusal_by_version(said: Introduction, now: float) -> str | None:
    """Return why nothing that it says can be gone by; None: it can."""
    theirs, ours = said.identity.protocol_version, PROTOCOL_VERSION
    if said.version != JOIN_VERSION or theirs != ours:
        return (
            f"the engine on {said.host} speaks protocol {theirs}, this gateway {ours}: run the "
            "same version of Tollgate on both"
        )
    behind_s = now - said.clock
    if abs(behind_s) > MAX_CLOCK_SKEW_S:
        where = "behind" if behind_s > 0 else "ahead of"
        skew = timedelta(seconds=round(abs(behind_s)))
        return f"the clock of {said.host} is {skew} {where} the gateway's: set it right"
    return None


def refusal_by_token(
    said: Introduction, token: StoredToken | None, num_used: int, now: float
) -> str | None:
    """Return why a token does not let an engine in; `num_used`: engines that joined by it."""
    if token is None or not token.is_of(said.secret):
        return "the token is not one of this gateway's"
    if token.revoked_at is not None:
        return f"token {token.id} was revoked"
    if now >= token.expires_at:
        ago = timedelta(seconds=int(now - token.expires_at))
        return f"token {token.id} expired {ago} ago: `tollgate fleet token create` makes another"
    if num_used >= token.uses:
        return f"token {token.id} has been used {num_used} of {token.uses} times: make another"
    return None


def refusal_by_role(role: EngineRole, model: JoinableModel, cell: str) -> str | None:
    """Return why no engine of a role can join the model; None: one can, where a place is free.
    `cell`: the one that lends it; empty: none does."""
    numbers = Counter(each.role for each in model.places if each.cell == cell)
    if role in numbers or not numbers:
        return None
    if "both" in numbers:
        return f"the engines of {model.name} have no roles here: --role {role} is none of theirs"
    may = " and ".join(f"{number} with --role {each}" for each, number in numbers.items())
    return f"the engines of {model.name} have roles: {may} may join, and none with --role {role}"


def refusal_by_model(
    identity: EngineIdentity,
    name: str,
    model: JoinableModel | None,
    own: Names,
    others: Mapping[str, EngineIdentity],
    *,
    wants_files: bool = False,
) -> str | None:
    """Return why it cannot be a replica of the model that it was let in for, `name`; `own`: the
    hashes of this home's files; `others`: the engines that joined the model, by replica;
    `wants_files`: it has none yet."""
    if identity.model != name and (identity.model or not wants_files):
        return f"the engine serves {identity.model}; it was let in for {name} (see --served-name)"
    if model is None:
        return f"no engine may join {name} here: its settings have no `joined` and no `borrow`"
    ours = options_of(model.options)
    for option, theirs in identity.options.items():
        if ours.get(option) != theirs:
            flag = f"--{option.replace('_', '-')}"
            return f"{flag} is {theirs} there and {ours.get(option)} in the settings of {name}"
    if wants_files:
        return None
    for folder in model.folders:
        if not any(place.startswith(f"{folder}/") for place in identity.files):
            return f"the engine lacks the {folder} that {name} has here"
    known = {"this gateway": own} | {replica: each.files for replica, each in others.items()}
    for who, files in known.items():
        for place in sorted(files.keys() & identity.files.keys()):
            if files[place] != identity.files[place]:
                theirs, here = (each[place][:SHOWN_DIGITS] for each in (identity.files, files))
                return f"{place} of {name} is another one there ({theirs}) than {who} has ({here})"
    return None
