"""What can keep a response from being run, or followed.

TooManyAtOnce
├── TooManyInBackground     its org has as many in the background as it may
└── TooManyFollowed         its org follows as many as it may on one worker
"""

from __future__ import annotations

from typing import ClassVar


class TooManyAtOnce(Exception):
    """`most`: as many as may be."""

    what: ClassVar[str]

    def __init__(self, most: int) -> None:
        super().__init__(f"{self.what} {most} already")
        self.most = most


class TooManyInBackground(TooManyAtOnce):
    what = "responses in the background"


class TooManyFollowed(TooManyAtOnce):
    what = "streams of responses in the background"
