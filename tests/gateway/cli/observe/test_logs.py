"""Logs of all processes, in one order, found by a request's id."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import tollgate
from gateway.cli.observe.logs import LogFiles, records_of

WORKER = [
    {"time": "2026-11-19T05:00:00.100+00:00", "level": "info", "logger": "a", "message": "begins"},
    {
        "time": "2026-11-19T05:00:02.000+00:00",
        "level": "error",
        "message": "failed",
        "request": "req_1",
        "exception": "Traceback (most recent call last):\n  x\nValueError: no",
    },
]
ENGINE = """2026-11-19T05:00:01.000Z INFO     engine: loads
2026-11-19T05:00:03.000Z ERROR    engine: step failed of req_1
Traceback (most recent call last):
  File "x"
RuntimeError: out of memory
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-0.log").write_text("".join(json.dumps(each) + "\n" for each in WORKER))
    (logs / "engine-0.log").write_text(ENGINE)
    (logs / "engine-0.log.1").write_text("2026-11-18T23:59:59.000Z INFO     engine: older\n")
    return tmp_path


def logs(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(tollgate, ["logs", "--home", str(home), *arguments])


def messages(done: Result) -> list[str]:
    assert done.exit_code == 0, done.output
    return [json.loads(line)["message"].split("\n")[0] for line in done.stdout.splitlines()]


def test_all_processes_are_in_the_order_of_time(home: Path) -> None:
    assert messages(logs(home, "--json")) == [
        "INFO     engine: older",
        "begins",
        "INFO     engine: loads",
        "failed",
        "ERROR    engine: step failed of req_1",
    ]


def test_an_id_finds_each_line_with_its_traceback(home: Path) -> None:
    shown = logs(home, "--request", "req_1").stdout
    assert shown.count("Traceback (most recent call last):") == 2
    assert "ValueError: no" in shown and "RuntimeError: out of memory" in shown
    assert "begins" not in shown and "[req_1]" in shown
    assert logs(home, "--request", "req_2").stdout == ""


def test_levels_processes_and_times_are_chosen(home: Path) -> None:
    assert messages(logs(home, "--json", "--level", "error")) == [
        "failed",
        "ERROR    engine: step failed of req_1",
    ]
    assert len(messages(logs(home, "--json", "--process", "engine"))) == 3
    assert messages(logs(home, "--json", "-n", "1")) == ["ERROR    engine: step failed of req_1"]
    assert len(messages(logs(home, "--json", "--since", "2026-11-19"))) == 4
    assert logs(home, "--since", "soon").exit_code == 2


def test_what_is_written_later_is_read_once_also_after_a_rotation(home: Path) -> None:
    files = LogFiles(home / "logs")
    assert len(list(files.all())) == 5
    assert list(files.fresh()) == []
    path = home / "logs" / "worker-0.log"
    line = json.dumps(WORKER[0] | {"message": "later"})
    with path.open("a") as file:
        file.write(line)
    assert list(files.fresh()) == [], "half a line is none"
    with path.open("a") as file:
        file.write("\n")
    assert [each.text for each in files.fresh()] == ["later"]
    path.write_text(line.replace("later", "cut") + "\n")
    assert [each.text for each in files.fresh()] == ["cut"]
    path.rename(path.with_name("worker-0.log.1"))
    path.write_text(line.replace("later", "rotated, and longer than what was read") + "\n")
    assert [each.text for each in files.fresh()] == ["rotated, and longer than what was read"]


def test_times_of_the_databases_are_read() -> None:
    lines = (
        b"2026-11-19 05:00:00.123 UTC [17] LOG:  ready\n"
        b"17:M 19 Nov 2026 05:00:01.500 * Ready\n"
        b"{broken\n"
        b"2026-11-19 05:00:02.000 UTC [17] FATAL:  no\n"
    )
    found = list(records_of(io.BytesIO(lines), "postgres"))
    assert [each.level for each in found] == ["info", "info", "critical"]
    assert found[0].time == 1795064400.123
    assert found[1].text.endswith("{broken")


def test_bytes_of_any_kind_are_shown_harmlessly(home: Path) -> None:
    (home / "logs" / "x.log").write_bytes(b"\xff\x1b[2J\x00\n" * 3 + b"no end")
    shown = logs(home).stdout
    assert "\x1b" not in shown and "\\u001b[2J" in shown


def test_a_home_without_logs_is_one_line(tmp_path: Path) -> None:
    done = logs(tmp_path)
    assert done.exit_code == 2 and "`tollgate up` makes it" in done.stderr


def test_a_try_before_postgres_is_up_is_no_fault(home: Path) -> None:
    (home / "logs" / "postgres.log").write_text(
        "2026-11-19 05:00:01.000 UTC [7] FATAL:  the database system is starting up\n"
        '2026-11-19 05:00:02.000 UTC [7] FATAL:  role "x" does not exist\n'
    )
    found = messages(logs(home, "--json", "--process", "postgres", "--level", "critical"))
    assert found == ['[7] FATAL:  role "x" does not exist']


def test_a_line_of_a_request_says_what_it_took(home: Path) -> None:
    line = WORKER[0] | {
        "process": "worker-1-8b7d20f5",
        "logger": "access",
        "message": "POST /v1/chat/completions 200",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "duration_ms": 49.6,
        "request": "req_9",
        "trace": "9",
        "key": "key_9",
        "org": "org_9",
        "model": "penny",
        "tokens": {"uncached": 12, "output": 14},
        "cost_pico_usd": 6_800_000,
        "queue_ms": None,
    }
    (home / "logs" / "worker-1.log").write_text(json.dumps(line) + "\n")
    assert logs(home, "--process", "worker-1").stdout == (
        "2026-11-19T05:00:00.100Z worker-1-8b7d20f5 info     POST /v1/chat/completions 200 "
        "duration_ms=49.6 key=key_9 model=penny uncached=12 output=14 usd=0.0000068 [req_9]\n"
    )


def test_an_older_copy_that_is_replaced_while_files_are_read_is_left_out(home: Path) -> None:
    (home / "logs" / "worker-9.log.1").symlink_to(home / "replaced")
    assert len(messages(logs(home, "--json"))) > 1


@pytest.mark.parametrize(("no_color", "has_colors"), [("", True), ("1", False), ("no", False)])
def test_no_color_takes_the_colors_away(home: Path, no_color: str, has_colors: bool) -> None:
    arguments = ["logs", "--home", str(home)]
    runner = CliRunner(env={"NO_COLOR": no_color})
    assert ("\x1b[" in runner.invoke(tollgate, arguments, color=True).stdout) == has_colors
