"""One surface of the table of fields."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class SurfaceFields(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    body: type[msgspec.Struct]
    ignored: Mapping[str, str]
    """Path to why."""
    notes: Mapping[str, str]
    """Path to what is to be known."""
    refused_values: Mapping[str, frozenset[str]]
    """By honoured field, the values that a vendor knows and that are refused by name."""
