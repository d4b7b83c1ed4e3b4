"""Says which cell this home is and which others it shares Postgres with, as `[cell]` has it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

CELL_PATTERN = r"^[a-z0-9](?:-?[a-z0-9]){0,31}\Z"
PORT = "(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
JOIN_PATTERN = rf"^tcp:[^\s\x00-\x1f]+:{PORT}\Z"
MAX_PEERS = 16
CellName = Annotated[str, Meta(pattern=CELL_PATTERN)]
JoinAddress = Annotated[str, Meta(pattern=JOIN_PATTERN)]


class PeerCellConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[cell.peer]]`: another cell, whose engines take requests of this one that has none or would
    be late, or the other way round."""

    name: CellName
    borrow: Annotated[int, Meta(ge=0, le=16)] = 0
    """So many engines of each model it may lend to this cell, where they come to
    `fleet.join_listen`."""
    lend_to: JoinAddress | None = None
    """Its `fleet.join_listen`, as it is reached from here: the engines of this home are lent to it.
    None: none are."""
    token_file: Path | None = None
    """The file with what `tollgate fleet token create --cell` printed there, for the first time."""


class CellConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cell]`: this home is one of several that share Postgres, and has a Redis of its own."""

    name: CellName
    """The same for all gateways that share its Redis, and for no other. Each limit per minute, and
    of concurrent requests, is divided between the cells by what they are asked for."""
    peer: Annotated[tuple[PeerCellConfig, ...], Meta(max_length=MAX_PEERS)] = ()

    def with_absolute_paths(self) -> CellConfig:
        return msgspec.structs.replace(self, peer=tuple(map(_with_absolute_path, self.peer)))


def problem_of(cell: CellConfig | None, join_listen: str | None) -> str | None:
    """Return what is wrong with a cell's peers, beginning with the key; None: nothing."""
    peers = () if cell is None else cell.peer
    assert cell is not None or not peers
    names: set[str] = set() if cell is None else {cell.name}
    for position, peer in enumerate(peers):
        at = f"cell.peer[{position}]"
        if peer.name in names:
            return f"{at}.name: {peer.name!r} is this cell or another peer"
        names.add(peer.name)
        if not peer.borrow and peer.lend_to is None:
            return f"{at}: wants borrow, lend_to or both"
        if peer.borrow and join_listen is None:
            return f"{at}.borrow: wants fleet.join_listen, where its engines come"
        if (peer.lend_to is None) != (peer.token_file is None):
            return f"{at}: lend_to and token_file go together"
    return None


def _with_absolute_path(peer: PeerCellConfig) -> PeerCellConfig:
    file = peer.token_file
    return msgspec.structs.replace(peer, token_file=None if file is None else file.absolute())
