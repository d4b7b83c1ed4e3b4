"""The units of deploy/systemd, as systemd reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
BIN = Path(sys.executable).parent
INSTALLED = "/opt/tollgate/bin"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda each: each.name)
def test_systemd_knows_every_line_of_the_unit(unit: Path, tmp_path: Path) -> None:
    # A template is looked at as one of its instances; the programs are looked for where they are.
    copy = tmp_path / unit.name.replace("@.", "@penny.")
    copy.write_text(unit.read_text().replace(INSTALLED, str(BIN)))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda each: each.name)
def test_its_commands_are_ones_that_the_cli_knows(unit: Path) -> None:
    commands = re.findall(rf"^Exec\w+={INSTALLED}/tollgate (.+)$", unit.read_text(), re.MULTILINE)
    assert commands
    for command, *arguments in (each.split() for each in commands):
        shown = subprocess.run(
            [BIN / "tollgate", command, "--help"], capture_output=True, text=True, timeout=60
        )
        assert shown.returncode == 0, shown.stderr
        options = [each for each in arguments if each.startswith("--")]
        assert [each for each in options if each not in shown.stdout] == []


def test_the_units_run_as_the_user_that_is_made() -> None:
    made = re.search(r"^u (\w+) ", (ROOT / "deploy/systemd/tollgate.sysusers").read_text(), re.M)
    assert made is not None
    for unit in UNITS:
        assert f"\nUser={made[1]}\n" in unit.read_text()
