"""Shows a person what a start does while it does it, and what to do once it is done.

On a terminal: a line for each stage that changes in place, with a bar where bytes are read.
Elsewhere, a log say: a line when a stage begins and one when it is done. Knows no process but an
engine's, at which it looks from outside.
"""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.processes.credentials_file import Credentials, curl_example
from gateway.settings.models import ModelConfig

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from engine.text.hub_weights import Transfer

WEIGHTS = "*.safetensors"
IMPORTING, READING, WARMING, SERVING = "starts", "reads its weights", "warms up", "serves"
LISTENS = "00010000"
"""The flags of a socket that accepts connections, in /proc/net/unix: `__SO_ACCEPTCON`."""
ABOUT = "about.md"
"""The file of a model's folder that describes the model, on one line."""
MAX_ABOUT_CHARS = 300
MEGABYTE = 1_000_000
FRAMES_S = 8
"""The drawing is made anew so many times in a second."""
BAR_CELLS = 24
MIN_CELLS_WITH_BAR = 80
NAME_CELLS = 10
LINE_EVERY_S = 10.0
"""A download has a line so often where nothing is drawn."""


class StartView:
    """Shows one start. `say` prints a line; `on_terminal`: draw stages in place."""

    def __init__(self, say: Callable[[str], None], *, on_terminal: bool = False) -> None:
        self._print = say
        display = StageDisplay() if on_terminal else None
        self._display = display if display is not None and display.can_draw else None
        self._began: dict[str, float] = {}
        self._steps: dict[str, str] = {}
        self._told = 0.0
        """When the last line of a download was printed, in monotonic seconds."""

    def say(self, line: str) -> None:
        """Print a line, above the stages that are drawn."""
        if self._display is None or not self._display.say(line):
            self._print(line)

    def show(self, card: ReadyCard) -> None:
        """Print what to do next; on a terminal so that it fits."""
        if self._display is None:
            self._print(card.text())
        else:
            self._display.show(card)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show what runs inside as a stage; one that fails is not called done."""
        self.begin(name)
        yield
        self.end(name)

    def begin(self, name: str) -> None:
        self._began[name] = time.monotonic()
        if self._display is None:
            self._print(f"Starting: {name}")
        else:
            self._display.begin(name)

    def download(self, repository: str, now: Transfer) -> None:
        """Show how far the download of a repository is, from any thread. Off a terminal: a line
        when it begins, and then every few seconds."""
        stage = download_of(repository)
        if self._display is not None:
            if stage not in self._began:
                self.begin(stage)
            self._display.step(stage, "", now.done, now.total, now.text())
        elif stage not in self._began:
            self._began[stage] = self._told = time.monotonic()
            self._print(f"Starting: {stage}, {now.total / MEGABYTE:.0f} MB")
        elif time.monotonic() - self._told >= LINE_EVERY_S:
            self._told = time.monotonic()
            size = f"{now.done / MEGABYTE:.0f} of {now.total / MEGABYTE:.0f} MB"
            self._print(f"Starting: {stage}, {size}, {now.text()}")

    def step(self, name: str, step: str, done: int = 0, total: int = 0) -> None:
        """Show what a stage that has begun does now, and how many bytes of it are done."""
        if name not in self._began:
            return
        if self._display is not None:
            self._display.step(name, step, done, total)
        elif step not in (IMPORTING, self._steps.get(name)):
            size = f", {total / MEGABYTE:.0f} MB" if total else ""
            self._print(f"Starting: {name} {step}{size}")
        self._steps[name] = step

    def end(self, name: str) -> None:
        began = self._began.pop(name, None)
        if began is None:
            return
        if self._display is None:
            self._print(f"Ready: {name}, after {time.monotonic() - began:.1f} s")
        else:
            self._display.end(name)

    def close(self) -> None:
        """Leave what is drawn as it stands: the start is over, or has failed."""
        self._began.clear()
        if self._display is not None:
            self._display.close()


def download_of(repository: str) -> str:
    """Return the name of the stage in which a repository's weights are downloaded."""
    return f"download of {repository}"


class DrawnStage(msgspec.Struct, kw_only=True):
    name: str
    began: float
    """Monotonic seconds, as `ended` is."""
    ended: float | None = None
    is_cut_short: bool = False
    """The start failed, or was interrupted, in it."""
    step: str = ""
    done: int = 0
    """Bytes, as `total` is; 0 of 0 where nothing is counted."""
    total: int = 0
    note: str = ""
    """This is said of the bytes, such as their rate."""

    def text(self, now: float, name_cells: int, width: int, *, ascii_only: bool) -> Text:
        """Return its line: a mark, the name, what it does, and for how long it has."""
        from rich.text import Text

        line = Text(no_wrap=True, overflow="ellipsis")
        if self.ended is not None:
            line.append("+ " if ascii_only else "✓ ", style="green")
        elif self.is_cut_short:
            line.append("x " if ascii_only else "✗ ", style="red")
        else:
            frames = "|/-\\" if ascii_only else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
            line.append(f"{frames[int(now * FRAMES_S) % len(frames)]} ", style="cyan")
        line.append(self.name.ljust(name_cells))
        if self.ended is None and self.step:
            line.append(f"  {self.step}", style="dim")
        if self.ended is None and self.total:
            part = self.done / self.total
            if width >= MIN_CELLS_WITH_BAR:
                full = int(part * BAR_CELLS)
                line.append("  " + ("#" if ascii_only else "━") * full, style="cyan")
                line.append(("." if ascii_only else "━") * (BAR_CELLS - full), style="bright_black")
            amount = f"{self.done / MEGABYTE:.0f} of {self.total / MEGABYTE:.0f} MB"
            line.append(f"  {amount}" if width >= MIN_CELLS_WITH_BAR else f" {part:.0%}")
            if self.note:
                line.append(f"  {self.note}", style="dim")
        seconds = (self.ended or now) - self.began
        shown = f"{seconds:.1f} s" if self.ended is not None else f"{seconds:.0f} s"
        line.append(f"  {shown}", style="dim")
        return line


class StageDisplay:
    """Draws stages on a terminal, each on its line, several times a second."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, markup=False, emoji=False)
        self._stages: list[DrawnStage] = []
        self._live: Live | None = None

    @property
    def can_draw(self) -> bool:
        """Tell whether the terminal can move its cursor: one of TERM=dumb gets lines."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def say(self, line: str) -> bool:
        """Print a line above what is drawn; False: nothing is."""
        if self._live is None:
            return False
        self._console.print(line, soft_wrap=True)
        return True

    def show(self, card: ReadyCard) -> None:
        self._console.print(card.styled(self._console.width), soft_wrap=True)

    def begin(self, name: str) -> None:
        from rich.live import Live

        self._stages.append(DrawnStage(name=name, began=time.monotonic()))
        if self._live is None:
            self._live = Live(
                get_renderable=self._text, console=self._console, refresh_per_second=FRAMES_S
            )
            self._live.start(refresh=True)

    def step(self, name: str, step: str, done: int, total: int, note: str = "") -> None:
        for stage in self._stages:
            if stage.name == name:
                stage.step, stage.done, stage.total, stage.note = step, done, total, note

    def end(self, name: str) -> None:
        for stage in self._stages:
            if stage.name == name:
                stage.ended = time.monotonic()

    def close(self) -> None:
        if self._live is None:
            return
        for stage in self._stages:
            stage.is_cut_short = stage.ended is None
        self._live.stop()
        self._live = None

    def _text(self) -> Text:
        from rich.text import Text

        now, longest = time.monotonic(), max((len(each.name) for each in self._stages), default=0)
        ascii_only, width = self._console.options.ascii_only, self._console.width
        return Text("\n", no_wrap=True, overflow="ellipsis").join(
            each.text(now, longest, width, ascii_only=ascii_only) for each in self._stages
        )


class EngineStages:
    """Tells from outside what an engine's process does until it serves.

    Bytes read since it opened its first file of weights are weights (proc_pid_io(5), `rchar`). It
    serves once it listens on its socket, as /proc/net/unix has it (proc_net(5)).
    """

    def __init__(self, folder: Path, address: str, proc: Path = Path("/proc")) -> None:
        self._socket = address.removeprefix("unix:")
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
            if self._listens(pid):
                return SERVING, 0, 0
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

    def _listens(self, pid: int) -> bool:
        """Raises: OSError, ValueError."""
        sockets = (self._proc / str(pid) / "net" / "unix").read_text().splitlines()
        return any(
            line.endswith(f" {self._socket}") and line.split(maxsplit=4)[3] == LISTENS
            for line in sockets
        )

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
    console: str
    """The address of the console."""
    sign_in: str | None = None
    """A link that signs the first owner in, once: for a terminal alone, too."""
    has_owner: bool = True
    """False: who opens the link first becomes the owner."""

    def blocks(self) -> list[str | list[tuple[str, str]]]:
        """Return what is on it: rows of a name and a text, and a call to paste."""
        if self.known is None:
            keys = (
                f"There is no {self.credentials}: its keys were shown to an earlier start and "
                "stay valid. Make another with `tollgate keys create --name me`."
            )
        else:
            keys = f"{self.credentials} (api_key for requests, admin_key for administration)"
        about = about_model(self.model)
        console = f"{self.console} (`tollgate users link` prints a link that signs in)"
        if self.sign_in is not None:
            does = (
                "signs the owner in" if self.has_owner else "who opens it becomes the first owner"
            )
            console = f"{self.sign_in} ({does}, once, within 15 minutes)"
        found: list[str | list[tuple[str, str]]] = [
            [
                ("Console", console),
                ("API base", self.base_url),
                ("Keys", keys),
                ("Model", f"{self.model.name}: {about}" if about else self.model.name),
            ]
        ]
        if self.known is not None:
            key = self.known.api_key if self.shows_key else None
            found.append(curl_example(self.base_url, self.model.name, self.credentials, key))
        found.append(
            [
                ("Next", "`tollgate status`, `tollgate usage`, `tollgate keys create --name me`; "
                 "`tollgate --help` lists the rest"),
                ("Stop", "Ctrl-C"),
            ]
        )  # fmt: skip
        return found

    def text(self) -> str:
        """Return it for an output that is kept: each text on one line."""
        return "\n" + "\n\n".join(
            each
            if isinstance(each, str)
            else "\n".join(f"{name:<{NAME_CELLS}}{text}" for name, text in each)
            for each in self.blocks()
        )

    def styled(self, width: int) -> Text:
        """Return it for a terminal. Texts are wrapped below each other, no command or path within;
        the call is left whole, so that it can be copied."""
        from rich.text import Text

        card = Text()
        for block in self.blocks():
            card.append("\n")
            if isinstance(block, str):
                card.append(block + "\n")
                continue
            for name, text in block:
                lines = wrapped(text, max(width - NAME_CELLS, NAME_CELLS))
                card.append(f"{name:<{NAME_CELLS}}", style="bold")
                card.append(("\n" + " " * NAME_CELLS).join(lines) + "\n")
        card.rstrip()
        return card


def wrapped(text: str, width: int) -> list[str]:
    """Break a text into lines between words; what stands in backquotes stays on one line."""
    parts = [part.replace(" ", "\0") if at % 2 else part for at, part in enumerate(text.split("`"))]
    whole = "`".join(parts)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


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
