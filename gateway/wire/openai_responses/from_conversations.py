"""Decodes bodies about conversations, or refuses them by the name of a field."""

from __future__ import annotations

from typing import TypeVar

from gateway.wire.openai_responses.context import to_items
from gateway.wire.openai_responses.from_responses import new_id, read_items
from gateway.wire.openai_responses.items import InItem, Item

T = TypeVar("T")


def read_body(body: bytes, kind: type[T]) -> T:
    """Raises BadField."""
    return read_items(body, "items", kind)


def to_new_items(given: list[InItem] | None) -> tuple[Item, ...]:
    """Raises BadField."""
    return to_items(given, new_id, {}, param="items")
