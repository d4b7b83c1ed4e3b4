"""Says what a check found."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["ok", "warning", "fails"]
GIB = 1 << 30


class Diagnosis(msgspec.Struct, frozen=True):
    """A check's result. `found`: what is so; `advice`: what to do about it, or None."""

    check: str
    state: State
    found: str
    advice: str | None = None
