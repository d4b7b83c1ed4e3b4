"""A process logs what it does, and some of it stands in an error message."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.logs import JsonFormatter
from gateway import logs
from gateway.logs import SUPERVISOR_FILE, KeptLogs, cut_log, last_error


def record(message: str, error: Exception | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("gateway.x", logging.ERROR, "f", 1, message, (), info)
    return JsonFormatter().format(made)


def test_a_record_is_one_line_of_json() -> None:
    line = record("two\nlines", ValueError("näh"))
    assert "\n" not in line
    read = json.loads(line)
    assert (read["level"], read["logger"], read["message"]) == ("error", "gateway.x", "two\nlines")
    assert read["exception"].endswith("ValueError: näh")
    assert read["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["old", "the last one", "", "  "], "the last one"),
        ([record("boom", ValueError("why")), "{}"], "ValueError: why"),
        (
            [record("Traceback:\n  x\nOSError: disk"), '{"level": "info", "message": "bye"}'],
            "OSError: disk",
        ),
        ([record("bad", ExceptionGroup("two", [ValueError("one")]))], "ValueError: one"),
        ([record("why"), record(logs.CLOSING_REMARKS[0])], "why"),
        ([record("why"), '{"level": "info", "cost": null, "tokens": {"output": 1}}'], "why"),
        (['{"not": ["a", "record"]}'], '{"not": ["a", "record"]}'),
    ],
)
def test_the_line_that_says_why(tmp_path: Path, lines: list[str], said: str) -> None:
    path = tmp_path / "child.log"
    path.write_text("\n".join(lines) + "\n")
    assert last_error(path, 0) == said


def test_lines_of_an_earlier_life_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "child.log"
    path.write_text("before\n")
    start = path.stat().st_size
    assert last_error(path, start) == f"see {path}"
    path.write_text("before\nafter\n")
    assert last_error(path, start) == "after"


def test_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "child.log"
    path.write_bytes(b"x" * (logs.MAX_TAIL_BYTES * 3) + b"\nend\n")
    assert last_error(path, 0) == "end"


SAYS_BOTH = """
import logging, sys
from gateway import logs
logs.configure("info", json_lines=sys.argv[1] != "supervisor", process=sys.argv[1])
logging.getLogger("engine.transport.client").info("connected to an engine")
logging.getLogger("engine.transport.client").warning("lost an engine")
"""


@pytest.mark.parametrize(
    ("process", "told"), [("supervisor", ["lost"]), ("worker-0", ["connected", "lost"])]
)
def test_a_person_who_may_paste_what_was_printed_is_told_of_no_connection(
    process: str, told: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAYS_BOTH, process],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stderr.splitlines()
    assert len(lines) == len(told)
    assert all(f"{word} " in line for word, line in zip(told, lines, strict=True))


def test_a_log_is_cut_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "child.log"
    with path.open("ab", buffering=0) as writer:
        for letter in b"abcd":
            writer.write(bytes([letter]) * 600)
            cut_log(path, 1000, 2)
            assert path.stat().st_size in (0, 600)
        cut_log(path, 1000, 2)
        writer.write(b"e")
    assert path.read_bytes() == b"e"
    assert (tmp_path / "child.log.1").read_bytes() == b"c" * 400 + b"d" * 600
    assert (tmp_path / "child.log.2").read_bytes() == b"a" * 400 + b"b" * 600
    path.write_bytes(b"f" * 1001)
    cut_log(path, 1000, 0)
    assert path.read_bytes() == b"" and (tmp_path / "child.log.1").exists()


def test_what_is_logged_is_copied_in_whole_lines_of_one_format(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("said before\n")
    reader, writer = os.pipe()
    files = KeptLogs(
        tmp_path, max_bytes=1000, keep=1, json_lines=True, copies=True, descriptor=writer
    )
    (tmp_path / SUPERVISOR_FILE).write_text("its own\n")
    files.start()
    with (tmp_path / "worker-0.log").open("a") as log:
        log.write('{"message":"one"}\n{"mess')
        log.flush()
        files.copy()
        log.write('age":"two"}\n')
        log.flush()
        (tmp_path / "postgres.log").write_text("ready\n")
        files.copy()
        log.truncate(0)
        log.write('{"message":"three"}\n')
    files.close()
    os.close(writer)
    with open(reader) as read:
        lines = [json.loads(line) for line in read]
    assert [each["message"] for each in lines] == ["one", "ready", "two", "three"]
    assert lines[1]["process"] == "postgres"


def test_a_stdout_that_nobody_reads_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CLOSE_TIMEOUT_S", 0.05)
    reader, writer = os.pipe()
    files = KeptLogs(
        tmp_path, max_bytes=1000, keep=1, json_lines=False, copies=True, descriptor=writer
    )
    files.start()
    (tmp_path / "worker-0.log").write_text("x" * 99 + "\n" * 1 + ("y" * 99 + "\n") * 5000)
    files.copy()
    files.close()
    assert len(os.read(reader, 1 << 20)) > 0
    os.close(reader)  # the thread sees that nobody reads any more
