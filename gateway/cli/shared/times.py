"""Reads the periods that commands take, and shows times. All times are of UTC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from foundation.periods import Span, read_span, to_minute

PERIOD_WORDS = "tollgate.period"
"""The words of a period in the meta of a context: a completion has nothing else to go by."""


def period(default: str) -> Callable[[Any], Any]:
    """Add the argument PERIOD, whose words need no quotes; the command gets `span`. Its help has to
    name the default."""

    def read(context: click.Context, _param: click.Parameter, words: Sequence[str]) -> Span:
        context.meta[PERIOD_WORDS] = words
        try:
            return read_span(" ".join(words) or default, datetime.now(UTC))
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return click.argument("span", nargs=-1, metavar="[PERIOD]", callback=read)


def to_day(moment: datetime | float | None) -> str:
    return to_minute(moment)[:10]
