"""Computes the digests of a command for its launch spec: executable, program and image.

Reads files and starts nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mcp_bridge.upstream.launch_errors import BadLaunch
from mcp_bridge.upstream.launch_spec import (
    Budget,
    Digest,
    FileDigest,
    ImageDigest,
    TreeDigest,
    file_sha256,
    tree_sha256,
)
from mcp_bridge.upstream.stdio.package_refs import images_in

INTERPRETERS = re.compile(
    r"(?:python|pypy)[\d.]*|node(?:js)?|bun|deno|ruby|perl|php|java|(?:ba|da|z|k)?sh"
)
"""Commands that run a file which their arguments name."""


def digests_of(
    name: str, command: str, args: Sequence[str], kept: Sequence[Digest] = ()
) -> tuple[Digest, ...]:
    """Return the digests of a command and of the files and folders in `kept`; it blocks.

    Raises: BadLaunch, for a missing file; DigestMismatch, for more than the budget.
    """
    budget = Budget(name)
    paths = [command, *_program(command, args)]
    paths += [each.path for each in kept if isinstance(each, FileDigest) and each.path not in paths]
    found: list[Digest] = [
        FileDigest(path=path, sha256=_read(name, path, budget)) for path in paths
    ]
    found += [
        msgspec.structs.replace(each, sha256=_read(name, each.path, budget))
        for each in kept
        if isinstance(each, TreeDigest)
    ]
    return (*found, *(ImageDigest(reference=each) for each in images_in(command, args)))


def _program(command: str, args: Sequence[str]) -> list[str]:
    """Return the file that an interpreter runs, if its path is absolute."""
    if INTERPRETERS.fullmatch(os.path.basename(command)) is None:
        return []
    return [each for each in args if os.path.isabs(each) and os.path.isfile(each)][:1]


def _read(name: str, path: str, budget: Budget) -> str:
    try:
        if os.path.isdir(path):
            return tree_sha256(Path(path), budget)
        return file_sha256(Path(path), budget)
    except OSError as error:
        raise BadLaunch(name, "digests", f"{path}: {error.strerror}") from None
