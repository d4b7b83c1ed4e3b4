"""Finds the texts of one request, for who may read them, and the place in them at which the cache
stopped.

Each reading is in the organization's audit log, noted in the transaction that reads: who, and of
which request, never a text.

A prompt is compared with those that the same key asked the same model shortly before: the one that
is longest the same is what it broke off from. That is a look at texts as they are stored, no word
of the engine, which names positions in tokens alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.columns import UNREADABLE
from gateway.permissions import SCOPE_CONTENT, may
from gateway.principal import Principal
from gateway.request_log.content import RequestContent, StoredMessage, encode
from gateway.request_log.content_log import CONTENT, unpack
from gateway.request_log.search import read_id, time_of
from gateway.request_log.tables import request_content, request_log
from gateway.secret import Cipher
from gateway.tenancy.projects import stores_content

log = logging.getLogger(__name__)

MAX_COMPARED = 8
"""Earlier requests whose texts are opened."""
MAX_LOOKED_AT = 200
"""Earlier requests of a key that are looked at for those."""
COMPARED_WITHIN = timedelta(hours=24)
CONTEXT_CHARS = 160
"""So much is shown before the break, and behind it."""


def may_read(principal: Principal, project_id: str) -> bool:
    """Tell whether somebody may read the texts of a project's requests: owners and admins of the
    organization, owners of the project, and keys with the scope."""
    return may(principal, SCOPE_CONTENT, project_id=project_id)


async def find_content(
    conn: AsyncConnection, cipher: Cipher, org: str, request_id: str, *, reader: Actor
) -> RequestContent | None:
    """Return the texts of a request, and note who reads them; None: none are stored. Last in the
    transaction of `conn`, which sees the org's rows."""
    digits = read_id(request_id)
    if digits is None:
        return None
    row = (await conn.execute(_select().where(*_is(org, digits)))).mappings().one_or_none()
    content = None if row is None else _open(cipher, row)
    if row is not None and content is not None:
        await _note_reading(conn, row, reader)
    return content


async def _note_reading(
    conn: AsyncConnection, row: sa.RowMapping, reader: Actor, parted: PromptBreak | None = None
) -> None:
    """Note that the texts of a request are read, and some words of an earlier one where it is
    compared with that."""
    shown = {} if parted is None else {"compared_with": parted.compared_with}
    await record(
        conn,
        org_id=row["org"],
        actor=reader,
        action="request.content.read",
        target=f"req_{row['id'].hex}",
        after=shown or None,
        project_id=row["project"],
    )


def _select() -> sa.Select[Any]:
    c = request_content.c
    return sa.select(request_content).where(stores_content(c.org, c.project))


def _is(org: str, digits: str) -> tuple[sa.ColumnElement[bool], ...]:
    c = request_content.c
    return (c.org == org, c.at == time_of(digits), c.id == UUID(digits))


def _open(cipher: Cipher, row: sa.RowMapping) -> RequestContent | None:
    """Return what is sealed in a row; None where its secret is gone, or it was changed."""
    try:
        return unpack(CONTENT.open(cipher, dict(row))["content"])
    except (*UNREADABLE, msgspec.MsgspecError) as error:
        log.error("the content of %s does not open: %s", row["id"], type(error).__name__)
        return None


class PromptBreak(msgspec.Struct, frozen=True, kw_only=True):
    """The place at which a prompt goes on otherwise than an earlier one."""

    place: str
    """`tools`, `messages[2]` or `prompts[0]`."""
    role: str = ""
    """The role of the message; empty: it is none."""
    same: str
    """The last words that are the same."""
    before: str
    """How the earlier one goes on; empty: it ends there."""
    now: str
    """How this one goes on; empty: it ends there."""
    compared_with: str
    """The id of the earlier request."""
    compared_at: datetime
    is_cut: bool = False
    """Texts are not whole there: the break may lie in what was not stored."""


class PromptPiece(msgspec.Struct, frozen=True):
    """A part of a prompt that is compared with its like."""

    place: str
    role: str
    text: str
    is_cut: bool = False


def pieces_of(content: RequestContent) -> Iterator[PromptPiece]:
    """Yield the parts of a prompt in the order in which most templates put them."""
    for tool in content.tools:
        yield PromptPiece("tools", "", encode(tool).decode())
    if content.tools_left_out:
        yield PromptPiece("tools", "", "", is_cut=True)
    expected = 0
    for message in content.messages:
        if message.index != expected:
            yield PromptPiece(f"messages[{expected}]", "", "", is_cut=True)
        expected = message.index + 1
        yield PromptPiece(
            f"messages[{message.index}]", message.role, text_of(message), bool(message.left_out)
        )
    for index, prompt in enumerate(content.prompts):
        yield PromptPiece(f"prompts[{index}]", "", prompt, bool(content.prompts_left_out))


def text_of(message: StoredMessage) -> str:
    """Return all that a message says, for a comparison."""
    calls = (f"{call.name} {call.arguments}" for call in message.calls)
    parts = (message.name and f"{message.name}:", message.reasoning, message.text, *calls)
    return "\n".join(part for part in parts if part)


def find_break(
    now: RequestContent, before: RequestContent, *, earlier_id: str, earlier_at: datetime
) -> tuple[int, PromptBreak | None]:
    """Compare two prompts; return how many characters are the same, and where they part. None: one
    is the beginning of the other."""
    num_same, said = 0, ""
    these, those = [*pieces_of(now)], [*pieces_of(before)]
    for piece, other in zip(these, those, strict=False):
        if (piece, piece.is_cut) == (other, False):
            num_same, said = num_same + len(piece.text) + 1, piece.text
            continue
        alike = (piece.place, piece.role) == (other.place, other.role)
        at = num_common(piece.text, other.text) if alike else 0
        at_end = at in (len(piece.text), len(other.text))
        found = PromptBreak(
            place=piece.place,
            role=piece.role,
            same=(piece.text[:at] or said)[-CONTEXT_CHARS:],
            before=other.text[at : at + CONTEXT_CHARS],
            now=piece.text[at : at + CONTEXT_CHARS],
            compared_with=earlier_id,
            compared_at=earlier_at,
            is_cut=at_end and (piece.is_cut or other.is_cut),
        )
        return num_same + at, found
    return num_same, None


def num_common(one: str, other: str) -> int:
    """Count the first characters that two texts share."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


class ExplainedContent(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of a request, and where the cache stopped in them, if that can be said."""

    content: RequestContent
    parted: PromptBreak | None = None


async def explain_content(
    conn: AsyncConnection,
    cipher: Cipher,
    org: str,
    request_id: str,
    *,
    compares: bool,
    reader: Actor,
) -> ExplainedContent | None:
    """Return the texts of a request, found in one query, and note who reads them, last in the
    transaction; None: none are stored. `compares`: look for the place at which it parts from
    earlier requests."""
    digits = read_id(request_id)
    if digits is None:
        return None
    c = request_content.c
    wanted: sa.Select[Any] | sa.CompoundSelect[Any] = _select().where(*_is(org, digits))
    if compares:
        ids = _earlier(org, digits).subquery("earlier")
        is_earlier = sa.and_(c.org == org, c.at == ids.c.at, c.id == ids.c.id)
        earlier = _select().join(ids, is_earlier).order_by(c.at.desc()).limit(MAX_COMPARED)
        wanted = sa.union_all(wanted, sa.select(earlier.subquery("compared")))
    rows = (await conn.execute(wanted)).mappings().all()
    this = next((row for row in rows if row["id"].hex == digits), None)
    content = None if this is None else _open(cipher, this)
    if this is None or content is None:
        return None
    parted = _nearest_break(cipher, content, [row for row in rows if row is not this])
    await _note_reading(conn, this, reader, parted)
    return ExplainedContent(content=content, parted=parted)


def _earlier(org: str, digits: str) -> sa.Select[Any]:
    """Select the last requests before one that its key asked the same model."""
    at, c, asked = time_of(digits), request_log.c, request_log.alias("asked")
    this = (asked.c.org == org, asked.c.at == at, asked.c.id == UUID(digits))
    key, model = (
        sa.select(column).where(*this).scalar_subquery() for column in (asked.c.key, asked.c.model)
    )
    found = sa.select(c.at, c.id).where(c.org == org, c.key == key, c.model == model)
    found = found.where(c.at > at - COMPARED_WITHIN, c.at < at)
    return found.order_by(c.at.desc(), c.id.desc()).limit(MAX_LOOKED_AT)


def _nearest_break(
    cipher: Cipher, content: RequestContent, rows: Sequence[sa.RowMapping]
) -> PromptBreak | None:
    """Return the break with the prompt that is longest the same; of several the latest."""
    best: tuple[int, PromptBreak | None] = (0, None)
    for row in sorted(rows, key=lambda row: row["at"], reverse=True):
        earlier = _open(cipher, row)
        if earlier is not None:
            found = find_break(
                content,
                earlier,
                earlier_id=f"req_{row['id'].hex}",
                earlier_at=row["at"].astimezone(UTC),
            )
            if found[0] > best[0]:
                best = found
    return best[1]
