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

    def look(self, key: K) -> V | None:
        """Return what is there; looking is not a use."""
        return self._items.get(key)

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


class WeighedLru(Lru[K, V]):
    """Bounds the sum of what its values weigh: `max_size`, in the unit of `weigh`."""

    def __init__(self, max_size: int, weigh: Callable[[V], int]) -> None:
        super().__init__(max_size)
        self._weigh = weigh
        self.size = 0

    def put(self, key: K, value: V) -> None:
        self.drop(key)
        self._items[key] = value
        self.size += self._weigh(value)
        while self.size > self.max_size:
            self.size -= self._weigh(self._items.popitem(last=False)[1])

    def drop(self, key: K) -> None:
        dropped = self._items.pop(key, None)
        if dropped is not None:
            self.size -= self._weigh(dropped)

    def drop_where(self, condition: Callable[[V], bool]) -> None:
        for key in [key for key, value in self._items.items() if condition(value)]:
            self.drop(key)

    def clear(self) -> None:
        super().clear()
        self.size = 0
