"""Shows a person what a start does while it does it, and what to do once it is done.

On a terminal: a line for each stage, with a bar where bytes are read. Elsewhere, a log say: a line
when a stage begins and one when it is done. Knows no process but an engine's, at which it looks
from outside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.processes.credentials_file import Credentials, curl_example
from gateway.settings.models import ModelConfig

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

WEIGHTS = "*.safetensors"
IMPORTING, READING, WARMING = "starts", "reads its weights", "warms up"
ABOUT = "about.md"
"""The file of a model's folder that describes the model, on one line."""
MAX_ABOUT_CHARS = 300
MEGABYTE = 1_000_000


class StartView:
    """Shows one start. `say` prints a line; `on_terminal`: draw stages in place."""

    def __init__(self, say: Callable[[str], None], *, on_terminal: bool = False) -> None:
        self._print = say
        self._progress: Progress | None = _open_progress() if on_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._steps: dict[str, str] = {}

    def say(self, line: str) -> None:
        """Print a line, above the stages that are drawn."""
        if self._tasks and self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._print(line)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show what runs inside as a stage; one that fails is not called done."""
        self.begin(name)
        yield
        self.end(name)

    def begin(self, name: str) -> None:
        self._began[name] = time.monotonic()
        if self._progress is None:
            self._print(f"Starting: {name}")
            return
        if not self._tasks:
            self._progress.start()
        self._tasks[name] = self._progress.add_task(name, total=None, step="", amount="")

    def step(self, name: str, step: str, done: int = 0, total: int = 0) -> None:
        """Show what a stage that has begun does now, and how many bytes of it are done."""
        if name not in self._began:
            return
        if self._progress is None:
            if self._steps.get(name) != step:
                size = f", {total / MEGABYTE:.0f} MB" if total else ""
                self._print(f"Starting: {name} {step}{size}")
        else:
            amount = f"{done / MEGABYTE:.0f}/{total / MEGABYTE:.0f} MB" if total else ""
            self._progress.update(
                self._tasks[name], step=step, amount=amount, completed=done, total=total or None
            )
        self._steps[name] = step

    def end(self, name: str) -> None:
        began = self._began.pop(name, None)
        if began is None:
            return
        if self._progress is None:
            self._print(f"Ready: {name}, after {time.monotonic() - began:.1f} s")
        else:
            self._progress.update(
                self._tasks[name], step="ready", amount="", completed=1, total=1, refresh=True
            )
            self._progress.stop_task(self._tasks[name])

    def close(self) -> None:
        """Leave what is drawn as it stands: the start is over, or has failed."""
        self._began.clear()
        if self._tasks and self._progress is not None:
            self._progress.stop()
        self._tasks.clear()


def _open_progress() -> Progress:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[step]}", style="dim", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
    )


class EngineStages:
    """Tells from outside what an engine's process does until it serves: bytes read since it opened
    its first file of weights are weights (proc_pid_io(5), `rchar`)."""

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        self._folder = folder
        self._proc = proc
        self._total = sum(path.stat().st_size for path in folder.glob(WEIGHTS))
        self._pid: int | None = None
        self._read_before: int | None = None
        self._was_open = False

    def look(self, pid: int) -> tuple[str, int, int]:
        """Return (step, bytes done, bytes in all). Never fails: a process may be gone."""
        if pid != self._pid:  # it was started anew
            self._pid, self._read_before, self._was_open = pid, None, False
        try:
            read, is_open = self._bytes_read(pid), self._has_weights_open(pid)
        except (OSError, ValueError):
            return IMPORTING, 0, 0
        if is_open and self._read_before is None:
            self._read_before = read
        if self._read_before is None:
            return IMPORTING, 0, 0
        self._was_open = self._was_open or is_open
        if self._was_open and not is_open:
            return WARMING, 0, 0
        return READING, min(read - self._read_before, self._total), self._total

    def _bytes_read(self, pid: int) -> int:
        """Raises: OSError, ValueError."""
        first = (self._proc / str(pid) / "io").read_text().partition("\n")[0]
        return int(first.removeprefix("rchar:"))

    def _has_weights_open(self, pid: int) -> bool:
        """Raises: OSError."""
        for each in (self._proc / str(pid) / "fd").iterdir():
            try:
                target = Path(os.readlink(each))
            except FileNotFoundError:  # closed meanwhile
                continue
            if target.suffix == ".safetensors":
                return True
        return False


class ReadyCard(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a person what to do with what has started."""

    base_url: str
    model: ModelConfig
    """The first one, for the example."""
    known: Credentials | None
    """None: the keys were shown to an earlier start."""
    credentials: Path
    shows_key: bool
    """The example holds the key itself: for a terminal, never for an output that is kept."""

    def text(self) -> str:
        rows: list[tuple[str, str]] = [("API base", self.base_url)]
        if self.known is None:
            keys = (
                f"There is no {self.credentials}: its keys were shown to an earlier start and "
                "stay valid. Make another with `tollgate keys create`."
            )
        else:
            keys = f"{self.credentials} (api_key for requests, admin_key for administration)"
        rows.append(("Keys", keys))
        about = about_model(self.model)
        rows.append(("Model", f"{self.model.name}: {about}" if about else self.model.name))
        after = [
            ("Next", "`tollgate status`, `tollgate usage`, `tollgate keys create --name me`; "
             "docs/administration.md has the rest"),
            ("Stop", "Ctrl-C"),
        ]  # fmt: skip
        blocks = [_in_rows(rows), _in_rows(after)]
        if self.known is not None:
            key = self.known.api_key if self.shows_key else None
            blocks.insert(1, curl_example(self.base_url, self.model.name, self.credentials, key))
        return "\n" + "\n\n".join(blocks)


def _in_rows(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<10}{value}" for name, value in rows)


def about_model(model: ModelConfig) -> str:
    """Return what the model's folder says of it, or else where it comes from."""
    if model.path is None:
        upstreams: Any = {each.upstream for each in model.replicas}
        return f"of {len(upstreams)} upstreams" if len(upstreams) > 1 else "of an upstream"
    try:
        with (model.path / ABOUT).open() as file:
            said = " ".join(file.read(MAX_ABOUT_CHARS).split())
    except (OSError, UnicodeDecodeError):
        said = ""
    return said if said.isprintable() and said else str(model.path)
