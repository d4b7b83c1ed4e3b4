"""How a family writes calls, as what a grammar is made of and what a parser has to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import NamedTuple


class CallFormat(NamedTuple):
    """opens (before arguments after) between (before arguments after) ... closes"""

    before: Callable[[str], str]
    """A function that returns the text before a call's arguments, by the function's name."""
    after: str
    opens: str = ""
    between: str = ""
    closes: str = ""
    alone: bool = False
    """A call that is the only one may stand without what opens and closes."""
    several: bool = True
    """There may be more than one call in a turn."""

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments, as the model would write them."""
        each = (f"{self.before(name)}{arguments}{self.after}" for name, arguments in calls)
        return f"{self.opens}{self.between.join(each)}{self.closes}"


def named(key: str) -> Callable[[str], str]:
    """The beginning of a call that is a JSON object with its arguments under `key`."""
    return lambda name: f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
