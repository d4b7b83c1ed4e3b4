"""compose.yaml and the Dockerfile: against their schemas and against this tree; and the steps that
build the image, in a folder. No container engine is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.environments import fresh_environment, installer

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def test_compose_matches_the_compose_specification() -> None:
    checked = subprocess.run(
        [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_compose_has_the_four_services_and_publishes_only_the_gateway_on_loopback() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert set(services) == {"gateway", "engine", "postgres", "redis"}
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"gateway": ["127.0.0.1:8000:8000"]}


@pytest.mark.parametrize("service", ["gateway", "engine"])
def test_the_commands_in_compose_are_ones_the_cli_knows(service: str) -> None:
    command = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["command"]
    shown = subprocess.run(
        [BIN / "tollgate", command[0], "--help"], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    for option in (word for word in command if word.startswith("--")):
        assert option in shown.stdout, f"tollgate {command[0]} has no {option}"


def test_dockerfile_passes_the_linter() -> None:
    linted = subprocess.run(
        [BIN / "hadolint", "--failure-threshold", "warning", "Dockerfile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_the_image_has_every_folder_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = project["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(copied) == {name.removesuffix("*") for name in found} | {"requirements"}


def test_everything_the_dockerfile_copies_is_here() -> None:
    lines = re.findall(r"^COPY (.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    lines = [line for line in lines if not line.startswith("--from=")]
    sources = [word for line in lines for word in line.split()[:-1]]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, each on one line without its comments."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    found = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in found) if name]


@pytest.mark.nightly
def test_every_step_that_builds_the_image_runs_in_a_folder(tmp_path: Path) -> None:
    """As the first stage says, but with uv's cache, and PyTorch from where `make run` has it."""
    build, image = tmp_path / "build", tmp_path / "opt" / "tollgate"
    build.mkdir()
    tools = fresh_environment(tmp_path / "tools") / "bin"
    uv = installer().Uv(Path(sys.prefix))
    environ = {**os.environ, **uv.environment, "PATH": f"{tools}:/usr/bin:/bin"}
    (tools / "uv").unlink()  # the step brings its own
    (tools / "pip").write_text(f'#!/bin/sh\nexec {tools}/python -m pip "$@"\n')
    (tools / "pip").chmod(0o755)
    stage = instructions()
    for name, rest in stage[: [each[0] for each in stage].index("FROM", 1)]:
        if name == "COPY":
            *sources, into = rest.split()
            for each in sources:
                copy(ROOT / each, build / into / ("" if into == each else each))
        elif name == "RUN":
            said = rest.replace("/opt/tollgate", str(image))
            said = said.replace("--torch-backend cpu", " ".join(uv.options))
            done = subprocess.run(
                ["/bin/sh", "-ec", said], cwd=build, env=environ, capture_output=True, text=True
            )
            assert done.returncode == 0, (said, done.stdout, done.stderr)
    for arguments in (["--version"], ["engine", "--help"], ["config", "check"]):
        command = [image / "bin" / "tollgate", *arguments]
        plain = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        shown = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
