"""Reads the requests that clients really sent, as `RECORD=1 make clients` keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("recorded")


def recorded(client: str) -> list[dict[str, Any]]:
    """Return a client's requests, one of each kind: method, path, headers and body."""
    lines = (FOLDER / f"{client}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def recorded_body(client: str, path: str, **changed: Any) -> dict[str, Any]:
    """Return the body that a client sent to `path`, with some fields changed."""
    (found,) = (each for each in recorded(client) if each["path"].partition("?")[0] == path)
    return {**found["body"], **changed}
