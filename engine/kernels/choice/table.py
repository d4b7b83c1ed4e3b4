"""Keeps what was measured on this machine: how long each way to compute something took.

A file in the folder of compiled kernels, one for each machine: its first line is the SHA-256 of the
second, which is JSON. What is damaged, of another machine or not to be read is measured again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.kernels.choice.machine import Machine

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 18
MAX_QUESTIONS = 1024
"""A model asks some dozens."""

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Name = Annotated[str, Meta(min_length=1, max_length=100)]
Times = dict[Name, Seconds]
"""Seconds by way."""


class _KeptTimes(msgspec.Struct, forbid_unknown_fields=True):
    machine: Machine
    times: Annotated[dict[Name, Times], Meta(max_length=MAX_QUESTIONS)]


def file_of(folder: Path, machine: Machine) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(machine)).hexdigest()
    return folder / f"measured-{digest[:16]}.txt"


def read_times(folder: Path, machine: Machine) -> dict[str, Times]:
    """Return what was measured on this machine, by question; empty where nothing valid is kept."""
    path = file_of(folder, machine)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        checksum, _, body = text.partition(b"\n")
        if len(text) > MAX_BYTES or hashlib.sha256(body).hexdigest().encode() != checksum:
            raise ValueError("it is not what was written")
        kept = msgspec.json.decode(body, type=_KeptTimes)
        if kept.machine != machine:
            raise ValueError("it is of another machine")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # msgspec's are ValueErrors
        logger.warning("%s is measured again: %s", path, error)
        return {}
    return kept.times


def write_times(folder: Path, machine: Machine, times: dict[str, Times]) -> None:
    """Replace the file. What cannot be written is measured at each start."""
    latest = dict(list(times.items())[-MAX_QUESTIONS:])
    body = msgspec.json.encode(_KeptTimes(machine, latest))
    text = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    if len(text) > MAX_BYTES:
        logger.warning("what was measured takes %d bytes and is not kept", len(text))
        return
    try:
        descriptor, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        os.replace(name, file_of(folder, machine))
    except OSError as error:
        logger.warning("what was measured is not kept: %s", error)


def fastest(times: Times, usual: str, margin: float) -> str:
    """Return the fastest way; `usual` unless another is `margin` times as fast."""
    best = min(times, key=lambda way: times[way])
    return best if times[best] * margin < times.get(usual, math.inf) else usual
