"""Reads the bodies of administration, and fills the views of its rows."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import Any, TypeVar

import msgspec

from billing.money import format_usd
from gateway.wire.shared.refusals import decode_kept, unsupported

S = TypeVar("S", bound=msgspec.Struct)


@cache
def decoder_of(kind: type[S]) -> msgspec.json.Decoder[S]:
    return msgspec.json.Decoder(kind)


@cache
def not_honoured(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the fields that OpenAI knows and nobody here honours: those of any type."""
    return tuple(each.name for each in msgspec.structs.fields(kind) if each.type is Any)


def read_body(content: bytes, kind: type[S]) -> S:
    """Read a body whose texts come to Postgres. Raises: BadField."""
    found: S = decode_kept(decoder_of(kind), content)
    for field in not_honoured(kind):
        if getattr(found, field) is not None:
            raise unsupported(field, "not supported here")
    return found


def view_of(kind: type[S], row: Any, **others: Any) -> S:
    """Show a row as a `kind`, whose fields have the names of the row's: moments are Unix seconds,
    and `amount_usd` is its `amount_pico`.

    `others`: the fields that are not the row's, or are shown in another way.
    """
    fields: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        if name in others:
            continue
        if name.endswith("_usd") and hasattr(row, pico := name.removesuffix("usd") + "pico"):
            amount = getattr(row, pico)
            fields[name] = None if amount is None else format_usd(int(amount))
        elif hasattr(row, name):
            value = getattr(row, name)
            fields[name] = to_seconds(value) if isinstance(value, datetime) else value
    return kind(**fields, **others)


def to_seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
