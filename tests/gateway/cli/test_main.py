"""The command line: help, one clear line for every mistake, and keys in a real database."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import psutil
import pytest
from click.testing import CliRunner, Result

from gateway.cli.identity.keys import KEY_COLUMNS
from gateway.cli.main import tollgate
from gateway.home import Home, HomeLock
from gateway.settings.file import SettingsError
from tests.scratch import make_scratch
from tests.test_structure import NO_SENTENCE

ROOT = Path(__file__).resolve().parents[3]
KEY = re.compile(r"sk-tg-(admin-)?[0-9A-Za-z]{43}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """In /tmp: pytest's own folders are too long for a socket."""
    made = make_scratch()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def environ(folder: Path, postgres_url: str, redis_url: str) -> dict[str, str]:
    """An installation on this test's own database."""
    return {
        "TOLLGATE_HOME": str(folder / "home"),
        "TOLLGATE_DATABASE_URL": postgres_url,
        "TOLLGATE_REDIS_URL": redis_url,
    }


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A process as a shell starts it, with `environ` beside the usual one."""
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def invoke(environ: dict[str, str], *arguments: str) -> Result:
    """The same in this process, which saves the imports."""
    return CliRunner().invoke(tollgate, arguments, env=environ, prog_name="tollgate")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("up", "gateway", "engine", "migrate", "keys", "TOLLGATE_HOME")),
        (("up",), ("--home", "--host", "--port", "--model", "--config", "--workers", "SIGHUP")),
        (("gateway",), ("--port", "must be configured", "SIGTERM")),
        (("migrate",), ("--home", "--config", "schema")),
        (("keys",), ("create", "list", "revoke")),
        (("keys", "create"), ("--name", "--project", "--scope", "--plan", "--expires-in-days")),
        (("keys", "create"), ("no plan of its own", "plans of its project and organization")),
        (("keys", "list"), ("--home", "--json", "oldest first")),
        (("orgs",), ("create", "list", "set-plan", "all keys below an organization together")),
        (("orgs", "create"), ("--name", "--plan", "--json")),
        (("orgs", "set-plan"), ("--plan", "--no-plan", "within a second")),
        (("projects",), ("create", "list", "set-plan", "all keys of a project together")),
        (("projects", "create"), ("--name", "--org", "--plan", "--json")),
        (("projects", "set-plan"), ("--org", "--plan", "--no-plan", "within a second")),
        (("keys", "revoke"), ("KEY", "within a second")),
    ],
)
def test_help_says_what_there_is(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = invoke({}, *arguments, "--help")
    assert done.exit_code == 0
    text = " ".join(done.output.split())
    assert [word for word in words if word not in text] == []


def test_every_command_and_option_explains_itself() -> None:
    """Help that opens with "Of this one" or "Whose" can be read by those alone who know it."""
    texts = list(explained(tollgate, ("tollgate",)))
    assert len(texts) > 200
    assert [(what, text) for what, text in texts if not text or NO_SENTENCE.match(text)] == []


def explained(command: click.Command, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each command and option below `command` with its help."""
    yield " ".join(names), command.help or ""
    for each in command.params:
        if isinstance(each, click.Option):
            yield " ".join((*names, *each.opts)), each.help or ""
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from explained(below, (*names, name))


def test_the_engine_gets_its_arguments_untouched() -> None:
    done = command("engine", "--help")
    assert done.returncode == 0
    assert "--listen" in done.stdout and "--max-num-seqs" in done.stdout
    assert command("engine", "--no-such-flag").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "environ", "line"),
    [
        (("up",), {"TOLLGATE_PROT": "1"}, "TOLLGATE_PROT: unknown; known are "),
        (("up", "--port", "70000"), {}, "--port: expected `int` <= 65535"),
        (("up", "--config", "no.toml"), {}, "config: no.toml does not exist"),
        (("up", "--model", "./no/model"), {}, "model model: "),
        (("gateway",), {}, "database_url: set TOLLGATE_DATABASE_URL"),
        (("keys", "list"), {"TOLLGATE_PORT": "x"}, "TOLLGATE_PORT: expected `int`"),
        (("keys", "list"), {}, "home: "),
        (("keys", "create", "--name", "x"), {}, "home: "),
        (("keys", "revoke", "key_x"), {}, "home: "),
        (
            ("up",),
            {"TOLLGATE_DATABASE_URL": "postgresql://u:p@127.0.0.1:1/d"},
            "database_url (TOLLGATE_DATABASE_URL): 127.0.0.1:1: Connection refused\n",
        ),
        (
            ("migrate",),
            {"TOLLGATE_REDIS_URL": "redis://:p@127.0.0.1:1/0"},
            "redis_url (TOLLGATE_REDIS_URL): 127.0.0.1:1: Connection refused\n",
        ),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, arguments: tuple[str, ...], environ: dict[str, str], line: str
) -> None:
    done = invoke({"TOLLGATE_HOME": str(folder / "home"), **environ}, *arguments)
    if isinstance(done.exception, SettingsError):  # `main` prints it
        assert str(done.exception).startswith(line) and done.output == ""
    else:
        assert done.exit_code == 2, done.exception
        assert done.stderr.startswith(f"tollgate: {line}")
        assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert not (folder / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "environ", "line"),
    [
        (("keys", "list"), {"TOLLGATE_PORT": "x"}, "TOLLGATE_PORT: expected `int`"),
        (("orgs", "create", "--name", "\udcff"), {}, r"'\udcff': not UTF-8"),
        (
            ("up", "--model", "no/model"),
            {"HF_HUB_OFFLINE": "1"},
            "model no/model: no/model is no folder here, not whole in the cache, and cannot be "
            "fetched: HF_HUB_OFFLINE is set",
        ),
    ],
)
def test_a_mistake_is_one_line_of_a_process(
    folder: Path, arguments: tuple[str, ...], environ: dict[str, str], line: str
) -> None:
    done = command(*arguments, TOLLGATE_HOME=str(folder / "home"), **environ)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"tollgate: {line}")
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert not (folder / "home").exists()


def test_a_key_of_an_upstream_that_is_not_there_is_told_before_the_start(folder: Path) -> None:
    config = folder / "t.toml"
    config.write_text(
        '[[model]]\nname = "b"\nupstream = "http://127.0.0.1:1/v1"\napi_key_env = "NO_SUCH"'
    )
    done = command("up", "--config", str(config), "--home", str(folder / "home"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "the environment variable NO_SUCH is not set" in done.stderr
    assert not (folder / "home").exists()


@pytest.mark.parametrize(
    ("file", "data", "line"),
    [
        ("tokenizer.json", b'{"model": ', "PATH/tokenizer.json is not a JSON object: Input data"),
        ("config.json", b"{no", "PATH/config.json is not a JSON object: JSON is malformed"),
        ("tokenizer_config.json", b"{no", "PATH/tokenizer_config.json: "),
        (
            "chat_template.jinja",
            b"{% for x in %}",
            "PATH/chat_template.jinja: chat template, line 1:",
        ),
        ("model.safetensors", None, "PATH has its weights as pytorch_model.bin alone; only"),
        (None, None, "PATH does not exist: give the folder of a model in Hugging Face's form"),
    ],
)
def test_a_model_that_cannot_be_served_is_told_before_the_start(
    folder: Path, file: str | None, data: bytes | None, line: str
) -> None:
    path = folder / "model"
    if file is not None:
        path.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"):
            shutil.copy(ROOT / "models/penny" / name, path / name)
        if data is None:
            (path / file).rename(path / "pytorch_model.bin")
        else:
            (path / file).write_bytes(data)
    done = invoke({"TOLLGATE_HOME": str(folder / "home")}, "up", "--model", str(path))
    assert isinstance(done.exception, SettingsError)  # `main` prints it, and leaves with 2
    assert str(done.exception).startswith(f"model model: {line.replace('PATH', str(path))}")
    assert not (folder / "home").exists()


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_is_not_there_is_told_before_the_start(folder: Path, missing: str) -> None:
    path = folder / "legal"
    path.mkdir()
    for name in {"adapter_config.json", "adapter_model.safetensors"} - {missing}:
        (path / name).touch()
    config = folder / "t.toml"
    config.write_text(
        '[[model]]\nname = "penny"\npath = "models/penny"\n'
        f'[[model.adapter]]\nname = "penny-legal"\npath = "{path}"\n'
    )
    done = command("up", "--config", str(config), "--home", str(folder / "home"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tollgate: adapter penny-legal: {path} has no {missing}\n"
    assert not (folder / "home").exists()


def test_a_home_in_use_is_one_line(folder: Path) -> None:
    home = Home(folder / "home")
    home.create()
    lock = HomeLock.acquire(home)
    config = folder / "t.toml"
    config.write_text('[[model]]\nname = "b"\nupstream = "http://127.0.0.1:1/v1"')
    done = command("up", "--config", str(config), "--home", str(home.root))
    lock.release()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tollgate: {home.root} is in use by a running `tollgate up`\n"
    assert list(home.run.iterdir()) == [], "it started something"


def test_first_keys_and_their_life(environ: dict[str, str], folder: Path) -> None:
    done = invoke(environ, "migrate")
    assert done.exit_code == 0, done.output
    path = folder / "home" / "credentials.json"
    assert path.stat().st_mode & 0o777 == 0o600
    first = path.read_text()
    assert len(KEY.findall(first)) == 2 and '"base_url": "http://127.0.0.1:8000/v1"' in first
    assert invoke(environ, "migrate").exit_code == 0
    assert path.read_text() == first

    made = invoke(environ, "keys", "create", "--name", "ci", "--expires-in-days", "1")
    assert made.exit_code == 0, made.output
    assert made.stderr == ""
    shown = dict(line.split(maxsplit=1) for line in made.stdout.splitlines()[:8])
    assert (shown["name"], shown["scopes"], shown["plan"]) == ("ci", "inference", "-")
    assert KEY.findall(made.stdout) != [] and KEY.fullmatch(shown["key"])
    assert "not shown again" in made.stdout
    key_id = shown["id"]

    def state_of_ci() -> list[str]:
        listed = invoke(environ, "keys", "list")
        assert listed.exit_code == 0, listed.output
        assert KEY.search(listed.output) is None, "a whole key is listed"
        header, *lines = listed.output.splitlines()
        assert header.split() == [each.title for each in KEY_COLUMNS]
        (line,) = (line for line in lines if line.startswith(key_id))
        assert {each.index(" active") for each in lines if " active" in each} <= {
            header.index(" STATE")
        }
        return line.split()

    assert state_of_ci()[1:3] == [f"sk-tg-...{shown['key'][-4:]}", "active"]
    assert state_of_ci()[-2:] == ["inference", "ci"]
    revoked = invoke(environ, "keys", "revoke", key_id)
    assert (revoked.exit_code, revoked.output) == (0, f"{key_id} is revoked.\n")
    assert state_of_ci()[2] == "revoked"


def test_keys_for_scripts(environ: dict[str, str]) -> None:
    assert invoke(environ, "migrate").exit_code == 0
    made = invoke(environ, "keys", "create", "--name", "ci", "--json")
    assert (made.exit_code, made.stderr) == (0, "")
    shown = json.loads(made.stdout)
    assert KEY.fullmatch(shown.pop("key")) and shown["name"] == "ci"
    listed = invoke(environ, "keys", "list", "--json")
    keys = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [key["name"] for key in keys] == ["default", "admin", "ci"]
    assert keys[-1] == shown | {"state": "active"}


def test_a_folder_that_is_no_home_gets_no_database(folder: Path) -> None:
    done = invoke({"TOLLGATE_HOME": str(folder)}, "keys", "list")
    line = f"tollgate: home: {folder} is not the home of a Tollgate; `tollgate up` makes one"
    assert (done.exit_code, done.stderr) == (2, f"{line} (see --home)\n")
    assert list(folder.iterdir()) == []


def test_a_key_is_never_made_under_a_secret_that_no_gateway_knows(
    environ: dict[str, str], folder: Path
) -> None:
    assert invoke(environ, "migrate").exit_code == 0
    (folder / "home" / "secret.json").unlink()
    done = invoke(environ, "keys", "create", "--name", "x")
    assert done.exit_code == 2 and done.stderr.startswith("tollgate: secret_key_file: ")
    assert len(invoke(environ, "keys", "list").stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("revoke", "key_nope"), "key: no key 'key_nope'"),
        (("create", "--name", "x", "--project", "nope"), "project: no project 'nope'"),
        (("create", "--name", "x", "--scope", "root"), "scopes: unknown scope 'root'"),
        (("create", "--name", "x", "--plan", "gold"), "plan: no plan 'gold'"),
        (("create", "--name", ""), "name: must have 1 to 100 characters"),
    ],
)
def test_what_the_database_refuses_is_one_line(
    environ: dict[str, str], arguments: tuple[str, ...], line: str
) -> None:
    assert invoke(environ, "migrate").exit_code == 0
    done = invoke(environ, "keys", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"tollgate: {line}") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_one_worker_alone(environ: dict[str, str], folder: Path) -> None:
    config = folder / "t.toml"
    config.write_text('[[model]]\nname = "b"\nupstream = "http://127.0.0.1:1/v1"')
    arguments = ("gateway", "--port", "0", "--config", str(config))
    assert invoke(environ, "migrate").exit_code == 0
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", *arguments],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=output,
            stderr=output,
        )
    try:
        url = wait_for_address(process)
        assert httpx.get(f"{url}/health/ready").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
    finally:
        process.terminate()
        status = process.wait(60)
    assert status == 0, log.read_text()
    assert [line for line in log.read_text().splitlines() if not line.startswith('{"time"')] == []


def wait_for_address(process: subprocess.Popen[bytes]) -> str:
    """Return the address it listens on, as the kernel says."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None
        for found in psutil.Process(process.pid).net_connections("tcp4"):
            if found.status == psutil.CONN_LISTEN:
                return f"http://127.0.0.1:{found.laddr.port}"
        time.sleep(0.05)
    raise AssertionError("it never listened")


def test_keys_without_any_server_running(folder: Path) -> None:
    """The embedded databases live as long as the command."""
    environ = {"TOLLGATE_HOME": str(folder / "home")}
    Home(folder / "home").create()
    empty = invoke(environ, "keys", "list")
    assert empty.exit_code == 2
    assert "run `tollgate migrate` first" in empty.stderr
    assert invoke(environ, "migrate").exit_code == 0
    assert len(invoke(environ, "keys", "list").output.splitlines()) == 3
    assert list((folder / "home" / "run").glob("*.pid")) == []


def test_the_status_of_nothing_is_one_line(folder: Path) -> None:
    done = invoke({"TOLLGATE_HOME": str(folder), "TOLLGATE_PORT": "1"}, "status")
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr == (
        "tollgate: no gateway answers at http://127.0.0.1:1: ConnectError (address of the "
        "settings: nothing was started here; --url, --port or --home names another)\n"
    )
