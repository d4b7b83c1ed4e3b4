"""Checks that the image that a container would be made of is the one that was pinned.

An engine names an image by its digest and fetches it by that; this finds one that was put in its
place where it is kept.
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
    """Return the images to ask the spec's command for."""
    if os.path.basename(spec.command) not in CONTAINERS:
        return []
    run = images_in(spec.command, spec.args)
    named = [each.reference for each in spec.digests if isinstance(each, ImageDigest)]
    return [each for each in named if each in run]


def check_images(
    spec: LaunchSpec, argv: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> None:
    """Check the pinned images of a spec.

    `argv`: what starts the server, its arguments last. It blocks. An engine that gives no answer or
    has no such image yet is not one that has another. Raises: DigestMismatch, OSError.
    """
    for reference in pinned_images(spec):
        asked = [*argv[: len(argv) - len(spec.args)], *ASK, reference]
        found = _digests(_answer(spec.name, asked, folder, environment))
        wanted = reference.rpartition("@")[2]
        if found and wanted not in {each.rpartition("@")[2] for each in found}:
            raise DigestMismatch(spec.name, f"{reference}: the image that is here is another one")


def _answer(name: str, argv: Sequence[str], folder: Path, environment: Mapping[str, str]) -> bytes:
    """Empty: there was none."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=said,
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
        said.seek(0)
        return said.read(MAX_ANSWER_BYTES)


def _digests(answer: bytes) -> list[str]:
    """Return `name@sha256:...`, of each registry that the image is from; none where there is no
    such answer."""
    try:
        return msgspec.json.decode(answer, type=list[str])
    except msgspec.DecodeError:
        return []
