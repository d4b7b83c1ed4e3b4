"""Says when what was used is kept, so that its answer may go out."""

from typing import Literal

SyncPolicy = Literal["group", "before_answer"]
"""`before_answer`: once it is synced; no crash loses anything that was answered. `group`: once it
is written, which survives the death of the process; a power cut loses what was answered within
MAX_UNSYNCED_S."""
MAX_UNSYNCED_S = 0.005
"""Under `group`: how long an answer may be out before its record is synced. While the oldest one is
older, as on a disk that hangs, others wait."""
