"""A bounded mapping that forgets what has been unused for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, ValuesView
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._items: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: K) -> bool:
        """True if it is there; asking is not a use."""
        return key in self._items

    def get(self, key: K) -> V | None:
        value = self._items.get(key)
        if value is not None:
            self._items.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self.max_size:
            self._items.popitem(last=False)

    def drop(self, key: K) -> None:
        """Drop an entry; idempotent."""
        self._items.pop(key, None)

    def drop_where(self, condition: Callable[[V], bool]) -> None:
        for key in [key for key, value in self._items.items() if condition(value)]:
            del self._items[key]

    def items(self) -> ItemsView[K, V]:
        """The longest unused first; not a use."""
        return self._items.items()

    def values(self) -> ValuesView[V]:
        return self._items.values()

    def clear(self) -> None:
        self._items.clear()
