"""Reads where a model's files come from: `hf:org/name@revision` or `s3://bucket/prefix`. Opens no
connection. A model may also come from other machines of the gateway that an engine joins: nobody
writes that source.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from engine.errors import ConfigError

SCHEMES = ("hf:", "s3:")
HUB = re.compile(
    r"hf:(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<place>[A-Za-z0-9][\w./-]*))?", re.ASCII
)
STORE = re.compile(
    # A path that was written with two slashes has one.
    r"s3:/{1,2}(?P<name>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<place>(/[\w.=+-]+)*)/?",
    re.ASCII,
)
MAX_CHARS = 1024
VERSION = re.compile(r"sha256:[0-9a-f]{64}")
"""A version of a model, by the digest of its files (`engine.model_files.version_of`)."""


class ModelSource(NamedTuple):
    """A place that a model's files come from."""

    kind: Literal["hf", "s3", "peer"]
    name: str
    """The repository, `org/name`, or the bucket, or the gateway's `host:port`."""
    place: str
    """The repository's branch, tag or commit, empty: its default branch; or the prefix of the
    objects' keys, without slashes around it, empty: none; or what the gateway calls the model."""

    def __str__(self) -> str:
        if self.kind == "hf":
            return f"hf:{self.name}" + (f"@{self.place}" if self.place else "")
        if self.kind == "peer":
            return f"peer:{self.name}/{self.place}"
        return f"s3://{self.name}" + (f"/{self.place}" if self.place else "")


def is_source(written: str | Path) -> bool:
    """Tell whether this is to name a source, rightly or wrongly, and no folder."""
    return str(written).startswith(SCHEMES)


def parse_source(written: str | Path) -> ModelSource:
    """Raises: ConfigError."""
    text = str(written)
    if len(text) <= MAX_CHARS and ".." not in text.split("/"):
        if found := HUB.fullmatch(text):
            return ModelSource("hf", found["name"], found["place"] or "")
        if found := STORE.fullmatch(text):
            return ModelSource("s3", found["name"], found["place"].strip("/"))
    raise ConfigError(
        f"{text[:MAX_CHARS]!r}: expected hf:ORG/NAME, hf:ORG/NAME@REVISION or s3://BUCKET/PREFIX"
    )
