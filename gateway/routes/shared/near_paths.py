"""Finds the path that a client means which asks for one that is not there: the base URL that it was
given lacks `/v1`, has it twice, or has something else before it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

PREFIX = "/v1"
PARAMETER = re.compile(r"\\\{[^}]*?(:path)?\\\}")
MAX_PATH_CHARS = 512
"""Nothing is suggested for a longer path."""


PathFinder = Callable[[str], str | None]


def path_finder(templates: Iterable[str]) -> PathFinder:
    """Return a function from a path that is not there to one below `/v1` that is, if it is near.
    `templates`: the paths of all routes."""
    known = [to_pattern(each) for each in set(templates) if each.startswith(PREFIX + "/")]

    def find(path: str) -> str | None:
        if len(path) > MAX_PATH_CHARS:
            return None
        return next(
            (near for near in candidates(path) if any(each.fullmatch(near) for each in known)), None
        )

    return find


def candidates(path: str) -> Iterator[str]:
    """Yield what may be meant: with the prefix, and from its last place on."""
    path = path.rstrip("/")
    last = path.rfind(PREFIX + "/")
    if last > 0:
        yield path[last:]
    elif last < 0:
        yield PREFIX + path


def to_pattern(template: str) -> re.Pattern[str]:
    def parameter(found: re.Match[str]) -> str:
        return "[^/]+" if found[1] is None else ".+"

    return re.compile(PARAMETER.sub(parameter, re.escape(template)))
