"""What can keep a response from being run.

TooManyInBackground     its org has as many in the background as it may
"""

from __future__ import annotations


class TooManyInBackground(Exception):
    def __init__(self, most: int) -> None:
        super().__init__(f"{most} run already")
        self.most = most
