"""The wheel of `make dist`: what is in it, and what it does in an empty environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.environments import ROOT, fresh_environment, installer

PATH = {"PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"}
ROOMS = ("foundation", "engine", "gateway", "billing", "mcp_bridge", "migrations", "models")
FOUND = """
import json
from gateway.mcp.service.service import own_version
from gateway.settings.load import load

settings = load({}, {})
files = [*settings.price_books, *(model.path for model in settings.models)]
print(json.dumps([own_version(), [str(each) for each in files if each.exists()]]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    stamp = Path(sys.prefix) / ".runtime"
    make = ["make", "-o", str(stamp), "dist", f"VENV={sys.prefix}", f"OUT={out}"]
    built = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the wheel, by pip, and what the lock names; neither PyTorch nor this checkout."""
    made = fresh_environment(tmp_path_factory.mktemp("wheel") / "venv")
    install = installer()
    uv = install.Uv(made)
    # The packages of others as links into uv's cache: a copy is 400 MB.
    lock = ROOT / "requirements" / "runtime.lock"
    uv.install("--link-mode", "symlink", *install.LOCKED, "-r", str(lock))
    pip = [str(made / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True)
    return made


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, as a socket's must be."""
    made = Path(tempfile.mkdtemp(prefix="tg-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def plain(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin"}


def test_the_wheel_has_every_file_of_the_rooms_and_nothing_else(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert sorted(set(listed.stdout.splitlines()) - set(names)) == []
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(ROOMS)
    assert [name for name in names if name.endswith(".pyc")] == []


def test_what_the_wheel_asks_for_is_in_the_lock(wheel: Path, environment: Path) -> None:
    uv = ["uv", "pip", "check", "--python", str(environment / "bin" / "python")]
    checked = subprocess.run(uv, env=plain(environment) | PATH, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"-{project['version']}-py3-none-any" in wheel.name
    assert {"engine", "gpu", "s3", "otel", "otel-grpc"} <= set(project["optional-dependencies"])


def test_its_prices_and_its_model_are_found_from_an_empty_folder(
    environment: Path, folder: Path
) -> None:
    python = str(environment / "bin" / "python")
    said = subprocess.run(
        [python, "-I", "-c", FOUND], cwd=folder, env=plain(folder), capture_output=True, check=True
    )
    version, files = json.loads(said.stdout)
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    inside = str(environment.resolve())
    assert [each for each in files if not each.startswith(inside)] == []
    assert {Path(each).name for each in files} >= {"2026-11.toml", "penny"}


def test_without_pytorch_it_says_how_to_get_it(environment: Path, folder: Path) -> None:
    tollgate = str(environment / "bin" / "tollgate")
    refused = subprocess.run(
        [tollgate, "up", "--home", "state"],
        cwd=folder,
        env=plain(folder),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 2
    python = environment / "bin" / "python"
    assert refused.stderr == (
        "tollgate: model penny: its engine needs torch, which is not installed: "
        f'uv pip install --python {python} --torch-backend auto "tollgate[engine]"\n'
    )
    engine = ["engine", "--model", "models/penny", "--listen", "tcp:127.0.0.1:0"]
    alone = subprocess.run(
        [tollgate, *engine],
        cwd=folder,
        env=plain(folder),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (alone.returncode, alone.stderr) == (
        2,
        "engine: torch is not installed: "
        'an engine needs what the extra "engine" of the package tollgate installs\n',
    )


@pytest.mark.nightly
def test_pip_installs_it_with_all_that_it_needs(wheel: Path, folder: Path) -> None:
    venv.create(folder / "venv", with_pip=True)
    # The lock's versions without its hashes, which pip would ask of the wheel as well.
    lock = (ROOT / "requirements" / "dev.lock").read_text()
    locked = re.findall(r"^([\w.-]+==[^\\]+)", lock, re.MULTILINE)
    (folder / "versions").write_text("\n".join(locked))
    python = str(folder / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "-qq", "-c", str(folder / "versions")]
    subprocess.run([*install, f"tollgate[s3,otel] @ {wheel.as_uri()}"], cwd=folder, check=True)
    for command in ([python, "-m", "pip", "check"], [f"{folder}/venv/bin/tollgate", "--help"]):
        subprocess.run(command, cwd=folder, env=plain(folder), capture_output=True, check=True)


@pytest.mark.nightly
def test_uv_installs_and_runs_it_as_a_tool(wheel: Path, folder: Path) -> None:
    uv = installer().Uv(Path(sys.prefix))
    own = {"UV_TOOL_DIR": f"{folder}/tools", "UV_TOOL_BIN_DIR": f"{folder}/bin"}
    environ = {**os.environ, **uv.environment, **own, "UV_LINK_MODE": "symlink"}
    lock = ROOT / "requirements" / "runtime.lock"
    named = [*uv.options, "--constraints", str(lock)]
    tool = [str(Path(sys.prefix) / "bin" / "uv"), "tool"]
    whole = f"tollgate[s3] @ {wheel.as_uri()}"
    subprocess.run([*tool, "install", *named, whole], cwd=folder, env=environ, check=True)
    for command in (
        [str(folder / "bin" / "tollgate")],
        [*tool, "run", *named, "--from", whole, "tollgate"],
    ):
        said = subprocess.run(
            [*command, "--help"], cwd=folder, env=environ, capture_output=True, text=True
        )
        assert said.stdout.startswith("Usage: tollgate"), said.stderr
