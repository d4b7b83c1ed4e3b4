"""compose.yaml and the Dockerfile, against their schemas and against this tree. No container engine
is needed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

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
