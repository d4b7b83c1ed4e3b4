"""The buckets of one page of a report, of one width, in UTC. Pure.

The first bucket begins at or before `start_time`, the last ends at or after `end_time`. `page` is
the start of a page, so that pages follow each other without gaps.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Literal

import msgspec

from billing.errors import ReportQueryError

BucketWidth = Literal["1m", "1h", "1d"]
WIDTH_S: Mapping[str, int] = {"1m": 60, "1h": 3600, "1d": 86400}
MAX_TIME = 253_402_300_800
"""The year 10000."""
PAGE_PREFIX = "page_"


class ReportWindow(msgspec.Struct, frozen=True):
    """The window of a page. `starts`: the Unix seconds at which its buckets begin."""

    starts: range
    width: int
    next_page: str | None

    @property
    def end(self) -> int:
        return self.starts.start + len(self.starts) * self.width


def window_of(
    start_time: int,
    end_time: int | None,
    width: int,
    limit: int | None,
    limits: tuple[int, int],
    page: str | None,
) -> ReportWindow:
    """Return the window of a query. `limits`: the default and the largest number of buckets.

    Raises: ReportQueryError.
    """
    default, most = limits
    limit = default if limit is None else limit
    if not 1 <= limit <= most:
        raise ReportQueryError(f"between 1 and {most}", param="limit")
    if not 0 <= start_time < MAX_TIME:
        raise ReportQueryError("between 1970 and 9999", param="start_time")
    end = int(time.time()) + 1 if end_time is None else end_time
    if end > MAX_TIME or (end_time is not None and end <= start_time):
        raise ReportQueryError("must be after the start, and no later than 9999", param="end_time")
    first = start_time - start_time % width
    if page is not None:
        digits = page.removeprefix(PAGE_PREFIX)
        known = page.startswith(PAGE_PREFIX) and re.fullmatch("[0-9]{1,12}", digits)
        if not known or not first < int(digits) < end or int(digits) % width:
            raise ReportQueryError("not a next_page of this query", param="page")
        first = int(digits)
    following = first + limit * width
    starts = range(first, min(following, end), width)
    return ReportWindow(starts, width, f"{PAGE_PREFIX}{following}" if following < end else None)
