"""The tokens with which engines join a home: a file each, which has the hash of the secret alone.

Workers make and revoke them; the process that engines come to reads them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import msgspec

from engine.transport.join_messages import JoinToken

MAX_TOKENS = 1000
"""The bound of one home; the oldest of those that ended make room."""
ID_FORM = re.compile("join_[0-9a-f]{16}")


class NotJoinable(Exception):
    """An error of a token for a model that no engine may join or that is not served, or for a cell
    that lends none. `field`: `model` or `cell`."""

    def __init__(self, message: str, *, field: Literal["model", "cell"] = "model") -> None:
        super().__init__(message)
        self.field = field


class TooManyTokens(Exception):
    """An error of a home that has `MAX_TOKENS` which still let engines join."""


class StoredToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token as it is kept. Times are Unix seconds."""

    id: str
    model: str
    """Empty: any that its `cell` may lend engines of."""
    cell: str = ""
    """The other cell whose engines it lets in; empty: engines of this home."""
    uses: int
    """So many engines may join by it."""
    secret_hash: str
    created_at: int
    expires_at: int
    revoked_at: int | None = None

    def is_of(self, secret: str) -> bool:
        return hmac.compare_digest(_hash(secret), self.secret_hash)

    def has_ended(self, now: float) -> bool:
        return self.revoked_at is not None or now >= self.expires_at


class JoinTokens:
    """The tokens in the folder of a home's joining. `joinable`: the models that engines may join
    now; `cells`: the other cells that may lend engines now; `served`: all models that are served,
    None: whoever asks knows that it is one of them."""

    def __init__(
        self,
        folder: Path,
        joinable: Callable[[], Collection[str]],
        cells: Callable[[], Collection[str]] = tuple,
        served: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self.folder, self.joinable, self.cells, self._served = folder, joinable, cells, served
        self._tokens = folder / "tokens"

    def draw(self, model: str, *, uses: int, expires_in_s: int) -> tuple[StoredToken, str]:
        """Draw one, which lets nobody in until it is kept, and the text that an engine is given.
        Raises: NotJoinable, OSError."""
        if model not in (names := self.joinable()):
            may = f"engines may join {', '.join(sorted(names)) or 'no model'}"
            if self._served is not None and model not in self._served():
                raise NotJoinable(f"no model of this name is served here; {may}")
            raise NotJoinable(f"the settings of {model} name no `joined` engines; {may}")
        return self._draw(model, "", uses, expires_in_s)

    def draw_for_cell(self, cell: str, *, uses: int, expires_in_s: int) -> tuple[StoredToken, str]:
        """Draw one for the engines of another cell, as `draw`."""
        if cell not in (names := self.cells()):
            which = f"{', '.join(sorted(names))} does" if names else "no cell does"
            reason = f"its [[cell.peer]] has to say `borrow`; {which}"
            raise NotJoinable(reason, field="cell")
        return self._draw("", cell, uses, expires_in_s)

    def _draw(self, model: str, cell: str, uses: int, life_s: int) -> tuple[StoredToken, str]:
        from gateway.fleet.joining.authority import JoinAuthority  # X.509: workers seldom need it

        authority, now = JoinAuthority(self.folder), int(time.time())
        secret = secrets.token_urlsafe(32)
        stored = StoredToken(
            id=f"join_{secrets.token_hex(8)}",
            model=model,
            cell=cell,
            uses=uses,
            secret_hash=_hash(secret),
            created_at=now,
            expires_at=now + life_s,
        )
        token = JoinToken(
            id=stored.id,
            secret=secret,
            model=model,
            expires_at=stored.expires_at,
            authority=authority.certificate,
        )
        return stored, token.to_text()

    def keep(self, token: StoredToken) -> None:
        """Let engines in by one that was drawn. Raises: TooManyTokens, OSError."""
        self._make_room(token.created_at)
        self._write(token)

    def all(self) -> list[StoredToken]:
        """Return them all, the oldest first."""
        if not self._tokens.exists():
            return []
        found = (self.get(path.stem) for path in self._tokens.glob("join_*.json"))
        there = (each for each in found if each is not None)
        return sorted(there, key=lambda each: (each.created_at, each.id))

    def get(self, token_id: str) -> StoredToken | None:
        if ID_FORM.fullmatch(token_id) is None:
            return None
        try:
            return msgspec.json.decode(self._path(token_id).read_bytes(), type=StoredToken)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def revoke(self, token: StoredToken) -> StoredToken:
        """Let nobody in by it any more, and who joined by it neither. Idempotent."""
        if token.revoked_at is None:
            token = msgspec.structs.replace(token, revoked_at=int(time.time()))
            self._write(token)
        return token

    def changed_at(self) -> int:
        """Return what is another number once any token was made or revoked."""
        try:
            return self._tokens.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _make_room(self, now: int) -> None:
        found = self.all()
        ended = [each for each in found if each.has_ended(now)]
        if len(found) - len(ended) >= MAX_TOKENS:
            raise TooManyTokens(f"{MAX_TOKENS} tokens still let engines join: revoke some")
        for each in ended[: max(0, len(found) + 1 - MAX_TOKENS)]:
            self._path(each.id).unlink(missing_ok=True)

    def _path(self, token_id: str) -> Path:
        return self._tokens / f"{token_id}.json"

    def _write(self, token: StoredToken) -> None:
        self._tokens.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._path(token.id).with_suffix(f".{os.getpid()}.new")
        written = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(written, "wb") as file:
            file.write(msgspec.json.encode(token))
        fresh.rename(self._path(token.id))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
