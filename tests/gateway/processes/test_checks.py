"""`tollgate doctor` judges what it finds."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gateway.cli.main import tollgate
from gateway.home import Home
from gateway.processes.checks import machine
from gateway.processes.checks.diagnosis import GIB, Diagnosis
from gateway.processes.checks.installation import check_mail, check_upstreams, diagnose
from gateway.processes.checks.stores import (
    SchemaState,
    judge_postgres,
    judge_redis,
    newest_revision,
)
from gateway.processes.credentials_file import Credentials, write
from gateway.settings.file import MailConfig, MetricsConfig, SettingsError
from gateway.settings.load import Settings, load
from tests.gateway.cli.shared.fake_gateway import serving

NEWEST = newest_revision()


async def found(checks: AsyncIterator[Diagnosis]) -> dict[str, Diagnosis]:
    return {each.check: each async for each in checks}


def settings_of(folder: Path, config: str = "", **flags: int) -> Settings:
    path = folder / "t.toml"
    path.write_text(config)
    return load({"home": folder / "home", "config": path, **flags}, {})


@pytest.mark.parametrize(
    ("number", "difference_s", "revision", "state", "words"),
    [
        (180_004, 0.1, NEWEST, "ok", "version 18.4"),
        (160_014, -0.1, NEWEST, "ok", "version 16.14"),
        (150_000, 0.0, NEWEST, "fails", "use Postgres 16 to 18"),
        (190_000, 0.0, NEWEST, "warning", "tested with Postgres 16 to 18"),
        (180_004, 0.0, None, "warning", "run `tollgate migrate`"),
        (180_004, 0.0, "0001", "warning", "run `tollgate migrate`"),
        (180_004, 0.0, "9998", "ok", "newer than this program's"),
        (180_004, 0.0, "9999", "fails", "newer than this program's"),
        (180_004, 60.0, NEWEST, "warning", "60.0 s ahead of this machine's"),
        (180_004, -60.0, NEWEST, "warning", "60.0 s behind this machine's"),
    ],
)
def test_what_postgres_says_is_judged(
    number: int, difference_s: float, revision: str | None, state: str, words: str
) -> None:
    serves = {"9998": NEWEST, "9999": "9998"}.get(revision or "")
    schema = SchemaState(revision=revision, serves=serves, newest=NEWEST)
    judged = judge_postgres(number, difference_s, schema)
    assert judged.state == state
    assert words in f"{judged.found} {judged.advice}"


@pytest.mark.parametrize(
    ("server", "state"),
    [
        ({"redis_version": "7.2.4", "valkey_version": "9.1.0"}, "ok"),
        ({"redis_version": "7.2.4"}, "ok"),
        ({"redis_version": "6.2.0"}, "fails"),
        ({}, "fails"),
    ],
)
def test_what_redis_says_is_judged(server: dict[str, str], state: str) -> None:
    assert judge_redis(server, 0.0).state == state
    assert judge_redis({"redis_version": "8.0"}, 9.0).state == "warning"


def test_what_others_may_read_is_told_with_the_command(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert machine.check_home(settings).state == "ok"
    settings.home.mkdir()
    secret = settings.home / "secret.json"
    secret.touch(mode=0o644)
    secret.chmod(0o644)
    assert machine.check_home(settings).advice == f"chmod 600 {secret}"


def test_a_full_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path)
    for free, state in ((GIB // 2, "fails"), (2 * GIB, "warning"), (90 * GIB, "ok")):
        space = type("Usage", (), {"free": free})
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, space=space: space)
        assert machine.check_disk(settings).state == state


def test_a_container_has_the_memory_that_it_may_use(tmp_path: Path) -> None:
    assert machine.available_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  8192 kB\n")
    assert machine.available_memory(tmp_path) == 8192 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert machine.available_memory(tmp_path) == 8192 * 1024
    (group / "memory.max").write_text("5000\n")
    assert machine.available_memory(tmp_path) == 4000


async def test_a_port_that_is_taken_names_who_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = settings_of(tmp_path, port=port)
    assert (await machine.check_port(settings)).state == "ok"
    with serving() as gateway:
        settings = settings_of(tmp_path, port=gateway.server_address[1])
        assert (await machine.check_port(settings)).state == "fails"
        gateway.on("GET", "/version", {"version": "0.1.0"})
        judged = await machine.check_port(settings)
        assert judged.state == "ok" and "Tollgate 0.1.0 answers" in judged.found


async def test_a_port_of_metrics_is_looked_at_too(tmp_path: Path) -> None:
    assert machine.check_metrics_port(settings_of(tmp_path), runs=False) is None
    with socket.create_server(("127.0.0.1", 0)) as other:
        metrics = MetricsConfig(port=other.getsockname()[1])
        settings = msgspec.structs.replace(settings_of(tmp_path), metrics=metrics)
        taken = [machine.check_metrics_port(settings, runs=runs) for runs in (False, True)]
    free = machine.check_metrics_port(settings, runs=False)
    assert [each and each.state for each in (*taken, free)] == ["fails", "ok", "ok"]


async def test_a_mail_server_is_reached_and_its_password_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as server:
        mail = MailConfig(
            host="127.0.0.1",
            port=server.server_address[1],
            sender="tollgate@example.com",
            user="u",
            password_env="MAIL_PASSWORD",
        )
        monkeypatch.delenv("MAIL_PASSWORD", raising=False)
        judged = await check_mail(mail)
        assert judged.state == "fails" and judged.advice == "set MAIL_PASSWORD"
        monkeypatch.setenv("MAIL_PASSWORD", "x")
        assert (await check_mail(mail)).state == "ok"
    judged = await check_mail(mail)
    assert judged.state == "fails" and "does not answer: " in judged.found


async def test_a_port_of_a_flag_is_found_by_the_credentials(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = settings_of(tmp_path, port=other.getsockname()[1])
    with serving() as gateway:
        known = Credentials(base_url=f"{gateway.url}/v1", api_key="sk-a", admin_key="sk-b")
        path = Home(settings.home).credentials
        path.parent.mkdir(exist_ok=True)
        write(path, known)
        assert "serves" not in (await machine.check_port(settings)).found
        gateway.on("GET", "/version", {"version": "0.1.0"})
        judged = await machine.check_port(settings)
        assert judged.found == f"free at 127.0.0.1; this home serves at {gateway.url}"
        path.write_text("no JSON")
        assert (await machine.check_port(settings)).found == "free at 127.0.0.1"


async def test_a_gpu_that_this_torch_cannot_use_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 560.1, 81559 MiB, 81000 MiB'\n")
    program.chmod(0o755)
    settings = settings_of(tmp_path)
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    assert "on the CPU" in (await machine.check_gpu(settings)).found
    monkeypatch.setattr(machine.shutil, "which", lambda _: str(program))
    for build, state in (("2.13.0+cpu", "warning"), ("2.13.0", "ok"), (None, "ok")):
        monkeypatch.setattr(machine, "torch_build", lambda build=build: build)
        judged = await machine.check_gpu(settings)
        assert judged.state == state and judged.found.startswith("NVIDIA H100, 560.1")
    program.write_text("#!/bin/sh\necho broken >&2\nexit 9\n")
    assert (await machine.check_gpu(settings)).found == "nvidia-smi fails: broken"


async def test_the_key_of_each_upstream_is_tried_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAR_KEY", raising=False)
    with serving() as gateway:
        config = (
            f'[[model]]\nname = "far"\nupstream = "{gateway.url}/v1"\napi_key_env = "FAR_KEY"\n'
        )
        settings = settings_of(tmp_path, config)
        (judged,) = (await found(check_upstreams(settings, ask=True))).values()
        assert (judged.state, judged.advice) == ("fails", "set FAR_KEY")
        monkeypatch.setenv("FAR_KEY", "sk-secret")
        assert gateway.asked == []
        for status, state in ((200, "ok"), (401, "fails"), (503, "warning")):
            gateway.on("GET", "/v1/models", {}, status=status)
            (judged,) = (await found(check_upstreams(settings, ask=True))).values()
            assert judged.state == state and "sk-secret" not in repr(judged)
        (judged,) = (await found(check_upstreams(settings, ask=False))).values()
        assert "--ask-upstreams tries it" in judged.found
        assert len(gateway.asked) == 3


async def test_without_settings_there_is_nothing_else_to_look_at(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("prot = 1")
    judged = await found(diagnose({"config": tmp_path / "t.toml"}, ask_upstreams=False))
    assert set(judged) == {"settings"} and "prot: unknown key" in judged["settings"].found


def test_doctor_looks_at_everything_of_real_databases(
    tmp_path: Path, postgres_url: str, redis_url: str
) -> None:
    environ = {
        "TOLLGATE_HOME": str(tmp_path / "home"),
        "TOLLGATE_DATABASE_URL": postgres_url,
        "TOLLGATE_REDIS_URL": redis_url,
        "TOLLGATE_PORT": "0",
    }
    assert CliRunner().invoke(tollgate, ["migrate"], env=environ).exit_code == 0
    done = CliRunner().invoke(tollgate, ["doctor", "--json"], env=environ)
    judged = {
        each.check: each
        for each in (msgspec.json.decode(line, type=Diagnosis) for line in done.stdout.splitlines())
    }
    assert done.exit_code == (1 if any(it.state == "fails" for it in judged.values()) else 0)
    assert {"settings", "home", "disk", "memory", "gpu", "postgres", "redis", "model penny"} <= set(
        judged
    )
    assert judged["postgres"].state == "ok" and NEWEST in judged["postgres"].found
    assert (judged["redis"].state, judged["model penny"].state) == ("ok", "ok")
    gone = environ | {"TOLLGATE_REDIS_URL": "redis://127.0.0.1:1/0"}
    done = CliRunner().invoke(tollgate, ["doctor"], env=gone)
    assert done.exit_code == 1
    assert "FAILS  redis" in done.stdout and "-> start it, or correct the URL" in done.stdout


def test_doctor_starts_nothing(tmp_path: Path) -> None:
    environ = {"TOLLGATE_HOME": str(tmp_path / "home"), "TOLLGATE_PORT": "0"}
    done = CliRunner().invoke(tollgate, ["doctor"], env=environ)
    assert "is embedded; it starts with `tollgate up`" in done.stdout
    assert not Home(tmp_path / "home").root.exists()


def test_config_check_says_what_a_start_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    done = run(tollgate, ["config", "check"])
    assert done.stdout.startswith("The defaults are good. Models: 1, MCP servers: 0, plans: 1.")
    Path("t.toml").write_text('[[model]]\nname = "x"\npath = "./nowhere"\n')
    done = run(tollgate, ["config", "check", "--config", "t.toml"])
    assert isinstance(done.exception, SettingsError) and "nowhere" in str(done.exception)
    assert not Path(".tollgate").exists()


def test_config_show_prints_keys_values_and_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tollgate.toml").write_text("port = 9000\n[mcp.loop]\nmax_rounds = 3\n")
    run = CliRunner().invoke
    done = run(tollgate, ["config", "show", "--given", "--json"])
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"key": "port", "value": 9000, "source": "tollgate.toml:1"},
        {"key": "mcp.loop.max_rounds", "value": 3, "source": "tollgate.toml:3"},
    ]
    done = run(tollgate, ["config", "show", "mcp.loop", "port", "--csv"])
    assert "mcp.loop.max_seconds,600.0,default" in done.stdout.splitlines()
    assert not any(line.startswith("host") for line in done.stdout.splitlines())
