"""`tollgate logs`: what the processes of a home have logged, in the order of time.

Reads HOME/logs, which needs no running gateway. A line is a JSON object (workers) or plain text
(engines, databases); lines that follow a plain one without a time of their own, such as those of a
traceback, belong to it.
"""

from __future__ import annotations

import heapq
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from foundation.periods import Span, read_span
from gateway.cli.shared.command import STATE, refuse, with_options
from gateway.cli.shared.tables import STYLES, printable
from gateway.cli.shared.target import examples
from gateway.home import Home
from gateway.settings.file import Flags
from gateway.settings.load import load

POLL_S = 0.25
MAX_LINE_BYTES = 1024 * 1024
"""A longer line is cut."""
MAX_RECORD_LINES = 2_000
DEFAULT_LINES = 200
LEVELS = ("debug", "info", "warning", "error", "critical")
TIMES = re.compile(
    r"(?:\d+:[A-Z] )?"  # Valkey's process and role
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?"
    r"|\d{1,2} [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d\.\d{1,6})"
    r"(Z|\+00:00| UTC| GMT)?"
)
LEVEL_WORDS = re.compile(
    r"\b(DEBUG|INFO|LOG|WARNING|ERROR|CRITICAL|FATAL|PANIC)\b"  # of Python and of Postgres
)
LEVELS_OF = {"LOG": "info", "FATAL": "critical", "PANIC": "critical"}
OF_EVERY_LINE = frozenset(
    ("time", "level", "process", "logger", "message", "pid", "exception", "request", "trace")
) | {"method", "route", "status", "org"}
"""Fields that a person sees in other places of a line, or reads in --json."""
COST = "cost_pico_usd"
PROCESS_CELLS = 17
NOT_YET = "FATAL:  the database system is starting up"
"""Postgres says so to each try of a start to reach it, which is no fault."""


class LogRecord(msgspec.Struct, frozen=True):
    """A record. `time`: Unix seconds; of a line that has none, that of the line before."""

    time: float
    process: str
    level: str
    text: str
    """The line as it is shown, with its traceback."""
    fields: dict[str, Any]
    """The members of a JSON line."""

    def tells_of(self, request_id: str) -> bool:
        return request_id in (self.fields.get("request"), self.fields.get("trace")) or (
            request_id in self.text
        )


@click.command(
    epilog=examples(
        "tollgate logs --level error",
        "tollgate logs --request req_0192 --since yesterday",
        "tollgate logs -f --process engine",
    )
)
@with_options(*STATE)
@click.option("--request", "request_id", help="Only lines with this request's or trace's id.")
@click.option("--process", help="Only of processes whose name begins so: worker, engine, postgres.")
@click.option("--level", type=click.Choice(LEVELS), help="Only this level and those above.")
@click.option("--since", help="Only of this time on: today, last 2h, 2026-11-19T05.")
@click.option(
    *("-n", "--lines", "number"),
    type=click.IntRange(0, 1_000_000),
    help=f"The newest so many. Default: {DEFAULT_LINES}, or all of a --request.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is logged from now on.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def logs(
    request_id: str | None,
    process: str | None,
    level: str | None,
    since: str | None,
    number: int | None,
    follow: bool,
    as_json: bool,
    **flags: Flags,
) -> None:
    """Show what the processes of this home have logged, oldest first."""
    folder = Home(load(flags).home).logs
    if not folder.is_dir():
        refuse(f"logs: {folder} does not exist; `tollgate up` makes it (see --home)", status=2)
    start = since_moment(since)

    def wanted(record: LogRecord) -> bool:
        return (
            record.time >= start
            and (process is None or record.process.startswith(process))
            and (level is None or LEVELS.index(record.level) >= LEVELS.index(level))
            and (request_id is None or record.tells_of(request_id))
        )

    files = LogFiles(folder)
    if number is None:
        number = None if request_id else DEFAULT_LINES
    found = newest(filter(wanted, files.all()), number)
    for record in found:
        show(record, as_json)
    if not found and not follow:
        what = f"No line of request {request_id} is" if request_id else "There is no such line"
        click.echo(f"{what} in {folder}; older ones may be gone ([logs] keep).", err=True)
        sys.exit(1 if request_id else 0)
    try:
        while follow:
            time.sleep(POLL_S)
            for record in filter(wanted, files.fresh()):
                show(record, as_json)
    except KeyboardInterrupt:
        return


def since_moment(since: str | None) -> float:
    """Return Unix seconds. Raises: click.BadParameter."""
    if since is None:
        return 0.0
    try:
        span: Span = read_span(since, datetime.now(UTC))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from None
    return span.start.timestamp()


def newest(records: Iterable[LogRecord], number: int | None) -> Sequence[LogRecord]:
    """Return the last `number` records (None: all) in the order of time."""
    if number is None:
        return sorted(records, key=attrgetter("time"))
    numbered = ((record.time, position, record) for position, record in enumerate(records))
    last = heapq.nlargest(number, numbered, key=itemgetter(0, 1))
    return [record for _, _, record in reversed(last)]


class LogFiles:
    """The log files of a home, older copies included, and how far each was read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[int, int]] = {}
        """Inode and offset, by file."""

    def all(self) -> Iterator[LogRecord]:
        """Yield the records of all files, each file's in its order."""
        for path in sorted(self._folder.glob("*.log.[0-9]*")):
            try:
                file = path.open("rb")
            except FileNotFoundError:  # a newer copy takes its place
                continue
            with file:
                yield from records_of(file, process_of(path))
        yield from self.fresh()

    def fresh(self) -> Iterator[LogRecord]:
        """Yield what was written since the last time, whole lines only."""
        for path in sorted(self._folder.glob("*.log")):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue
            with file:
                found = os.fstat(file.fileno())
                inode, offset = self._read.get(path, (found.st_ino, 0))
                if inode != found.st_ino or offset > found.st_size:
                    offset = 0  # it was rotated, or cut
                file.seek(offset)
                yield from records_of(file, process_of(path))
                self._read[path] = (found.st_ino, file.tell())


def process_of(path: Path) -> str:
    return path.name.partition(".log")[0]


def records_of(file: IO[bytes], process: str) -> Iterator[LogRecord]:
    """Read records up to the last whole line, and leave the file there."""
    held: LogRecord | None = None
    more: list[str] = []
    moment = 0.0
    while True:
        begins_at = file.tell()
        line = file.readline(MAX_LINE_BYTES)
        if not line:
            break
        if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
            file.seek(begins_at)  # it is being written
            break
        record = read_line(line.decode(errors="replace").rstrip("\r\n"), process, moment)
        if held is not None and record.time == 0.0 and len(more) < MAX_RECORD_LINES:
            more.append(record.text)
            continue
        if held is not None:
            yield with_lines(held, more)
        moment = record.time or moment
        held, more = record if record.time else msgspec.structs.replace(record, time=moment), []
    if held is not None:
        yield with_lines(held, more)


def with_lines(record: LogRecord, more: Sequence[str]) -> LogRecord:
    if not more:
        return record
    return msgspec.structs.replace(record, text="\n".join((record.text, *more)))


def read_line(line: str, process: str, before: float) -> LogRecord:
    """Read one line. `time` is 0 for a plain line without one: it goes on with the line before."""
    if line.startswith("{"):
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            moment = datetime.fromisoformat(str(fields.get("time"))).timestamp()
        except (ValueError, RecursionError, msgspec.DecodeError):
            pass
        else:
            level = str(fields.get("level", "info")).lower()
            text = str(fields.get("message", ""))
            if fields.get("exception"):
                text += f"\n{fields['exception']}"
            name = str(fields["process"]) if "process" in fields else process
            level = level if level in LEVELS else "info"
            return LogRecord(moment or before, name, level, text, fields)
    if (found := TIMES.match(line)) is None:
        return LogRecord(0.0, process, "info", line, {})
    word = LEVEL_WORDS.search(line, found.end(), found.end() + 40)
    level = "info" if word is None else LEVELS_OF.get(word[1], word[1].lower())
    text = line[found.end() :].strip() or line
    level = "info" if text.endswith(NOT_YET) else level
    return LogRecord(moment_of(found[1], is_utc=found[2] is not None), process, level, text, {})


def moment_of(text: str, *, is_utc: bool) -> float:
    """Return Unix seconds of a time that a process wrote in its own zone, or in UTC, as Valkey
    does."""
    form = "%d %b %Y %H:%M:%S.%f" if text[2:3] == " " or text[1:2] == " " else None
    try:
        if form is not None:
            found = datetime.strptime(text, form)
        else:
            found = datetime.fromisoformat(text.replace(",", "."))
    except ValueError:
        return 0.0
    return (found.replace(tzinfo=UTC) if is_utc or form is not None else found).timestamp()


def details_of(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a line has besides its text: model, tokens, cost and durations of a request."""
    for name, value in fields.items():
        if name in OF_EVERY_LINE or value is None:
            continue
        if isinstance(value, dict):
            yield from (f"{kind}={number}" for kind, number in value.items())
        elif name == COST and isinstance(value, int):
            yield f"usd={Decimal(value).scaleb(-12).normalize():f}"
        else:
            yield f"{name}={value}"


def show(record: LogRecord, as_json: bool) -> None:
    when = datetime.fromtimestamp(record.time, UTC).isoformat(timespec="milliseconds")
    if as_json:
        said = {"time": when, "process": record.process, "level": record.level}
        text = {"message": record.text}
        click.echo(msgspec.json.encode(said | text | record.fields).decode())
        return
    level = click.style(f"{record.level:<8}", fg=STYLES.get(record.level))
    first, *others = record.text.split("\n")
    request = record.fields.get("request")
    about = f" [{printable(str(request))}]" if request else ""
    what = " ".join((first, *details_of(record.fields)))
    click.echo(f"{when[:23]}Z {record.process:<{PROCESS_CELLS}} {level} {printable(what)}{about}")
    for line in others:
        click.echo(f"    {printable(line.replace(chr(9), '    '))}")
