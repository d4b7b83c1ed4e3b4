"""A container's image is compared before it is run, where the engine can be asked: a program that
answers as docker(1) does stands in for the far end."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcp_bridge.upstream.launch_errors import DigestMismatch
from mcp_bridge.upstream.launch_spec import ImageDigest, LaunchSpec
from mcp_bridge.upstream.stdio import images
from mcp_bridge.upstream.stdio.process import Launcher
from tests.mcp_bridge.upstream.stdio.servers import OWNER

REFERENCE = "acme/server@sha256:" + "a" * 64
OTHER = "acme/server@sha256:" + "b" * 64
DOCKER = """#!/bin/sh
echo "$@" >> {folder}/asked
if [ "$1" = image ]; then {inspect}; fi
exec cat
"""


def engine(folder: Path, inspect: str) -> LaunchSpec:
    folder.mkdir(mode=0o755)
    made = folder / "docker"
    made.write_text(DOCKER.format(folder=folder, inspect=inspect))
    made.chmod(0o755)
    return LaunchSpec(
        name="boxed",
        command=str(made),
        args=("run", "-i", REFERENCE),
        digests=(ImageDigest(reference=REFERENCE),),
    )


async def asked_of(launcher: Launcher, spec: LaunchSpec) -> list[str]:
    process = await launcher.start(spec, OWNER, {})
    try:
        process.stdin.write(b"hello\n")
        assert await process.stdout.readline() == b"hello\n"
    finally:
        await process.stop()
    return Path(spec.command).with_name("asked").read_text().splitlines()


@pytest.mark.parametrize(
    "inspect",
    [
        f"""echo '["mirror.example/server@sha256:{"a" * 64}"]'; exit 0""",
        "exit 1",
        "echo no JSON; exit 0",
        "echo '[]'; exit 0",
    ],
)
async def test_the_image_that_was_pinned_is_run(
    launcher: Launcher, scratch: Path, inspect: str
) -> None:
    """As is one that is not here yet, or of which the engine says nothing: it fetches it by its
    digest."""
    first, second = await asked_of(launcher, engine(scratch / "bin", inspect))
    assert first.startswith("image inspect ") and first.endswith(REFERENCE)
    assert second == f"run -i {REFERENCE}"


async def test_another_image_in_its_place_is_not_run(launcher: Launcher, scratch: Path) -> None:
    spec = engine(scratch / "bin", f"""echo '["{OTHER}"]'; exit 0""")
    with pytest.raises(DigestMismatch, match="boxed: acme/server@.*is another one"):
        await launcher.start(spec, OWNER, {})
    assert launcher.num_running == 0
    (asked,) = (scratch / "bin" / "asked").read_text().splitlines()
    assert asked.startswith("image inspect ")


async def test_an_engine_that_does_not_answer_is_left(
    launcher: Launcher, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "ASK_TIMEOUT_S", 0.05)
    spec = engine(scratch / "bin", "sleep 600")
    assert (await asked_of(launcher, spec))[-1] == f"run -i {REFERENCE}"
