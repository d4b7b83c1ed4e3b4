"""Checks that the image of a container is the pinned one.

A container engine fetches an image by its digest; this check finds an image that was replaced in
the engine's local store.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mcp_bridge.upstream.launch_errors import DigestMismatch
from mcp_bridge.upstream.launch_spec import ImageDigest, LaunchSpec
from mcp_bridge.upstream.stdio.package_refs import CONTAINERS, images_in

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = 1024 * 1024
ASK = ("image", "inspect", "--format", "{{json .RepoDigests}}")


def pinned_images(spec: LaunchSpec) -> list[str]:
    """Return the pinned images that the spec's container command runs."""
    if os.path.basename(spec.command) not in CONTAINERS:
        return []
    run = images_in(spec.command, spec.args)
    named = [each.reference for each in spec.digests if isinstance(each, ImageDigest)]
    return [each for each in named if each in run]


def check_images(
    spec: LaunchSpec, argv: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> None:
    """Check the pinned images of a spec; it blocks.

    `argv`: the command line of the server, its arguments last. An engine that gives no answer, or
    does not have the image yet, passes. Raises: DigestMismatch, OSError.
    """
    for reference in pinned_images(spec):
        asked = [*argv[: len(argv) - len(spec.args)], *ASK, reference]
        found = _digests(_answer(spec.name, asked, folder, environment))
        wanted = reference.rpartition("@")[2]
        if found and wanted not in {each.rpartition("@")[2] for each in found}:
            raise DigestMismatch(spec.name, f"{reference}: the image that is here is another one")


def _answer(name: str, argv: Sequence[str], folder: Path, environment: Mapping[str, str]) -> bytes:
    """Return the output of the engine; empty if it failed."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(ASK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode != 0:
            log.warning("%s: its container engine does not say which image it has", name)
            return b""
        output.seek(0)
        return output.read(MAX_ANSWER_BYTES)


def _digests(answer: bytes) -> list[str]:
    """Return the `name@sha256:...` of the image at each registry."""
    try:
        return msgspec.json.decode(answer, type=list[str])
    except msgspec.DecodeError:
        return []
