"""Named pieces of work in a child process: one that crashes, hangs or takes the CUDA context with
it costs its own result, and the others go on in a fresh child.

The child is the same command with `--child NAME...`; it says a line of JSON behind MARK when a
piece begins and another when it ends, and what else it prints is passed on.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MARK = "\x1e"
CUDA_LOST = ("CUDA error", "AcceleratorError", "illegal memory access", "device-side assert")
"""In an error's text: this process's context is gone, whatever is run next."""

Piece = Callable[[], dict[str, Any]]


def serve(pieces: Sequence[tuple[str, Piece]]) -> None:
    """The child: each piece's result, or its error, to standard output."""
    for name, piece in pieces:
        _say({"begin": name})
        began = time.perf_counter()
        try:
            result = piece()
        except Exception as error:
            traceback.print_exc()
            first = str(error).strip().partition("\n")[0]
            result = {"error": f"{type(error).__name__}: {first}"}
        result["seconds"] = round(time.perf_counter() - began, 2)
        _say({"end": name, "result": result})
        if any(text in result.get("error", "") for text in CUDA_LOST):
            sys.stdout.flush()
            os._exit(1)  # tidying up would only raise it again


def _say(message: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(message)}", flush=True)


def supervise(
    command: Sequence[str],
    names: Sequence[str],
    *,
    piece_timeout_s: float,
    budget_s: float = float("inf"),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name with its result, {"error": ...} where it has none. A piece that is silent for
    `piece_timeout_s`, or a child that does not begin within it, is ended; past the budget no more
    are begun."""
    left = list(names)
    deadline = time.monotonic() + budget_s
    while left:
        before = len(left)
        for name, result in _one_child([*command, "--child", *left], piece_timeout_s, deadline):
            left.remove(name)
            yield name, result
        if left and time.monotonic() >= deadline:
            for name in left:
                yield name, {"error": f"not begun: the budget of {budget_s:.0f} s is spent"}
            return
        if len(left) == before:  # not one begun
            name = left.pop(0)
            yield name, {"error": "the child ended before it began"}


def supervise_at_once(
    command: Sequence[str],
    names: Sequence[str],
    *,
    jobs: int,
    piece_timeout_s: float,
    budget_s: float = float("inf"),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same with so many children at a time, in whatever order they end."""
    results: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

    def work(own: Sequence[str]) -> None:
        done = set()
        try:
            for name, result in supervise(
                command, own, piece_timeout_s=piece_timeout_s, budget_s=budget_s
            ):
                done.add(name)
                results.put((name, result))
        finally:  # whatever went wrong, nobody waits for ever
            for name in set(own) - done:
                results.put((name, {"error": "its supervisor ended before it"}))

    # Neighbours share compiled kernels, but also their length: each child gets some of all.
    shares = [names[i::jobs] for i in range(jobs)]
    for share in shares:
        threading.Thread(target=work, args=(share,), daemon=True).start()
    for _ in names:
        yield results.get()


def _one_child(
    command: Sequence[str], piece_timeout_s: float, deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    child = subprocess.Popen(
        [sys.executable, "-u", "-m", *command], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    running: str | None = None
    try:
        for message in _messages(child, piece_timeout_s):
            if message is None:
                if running is not None:
                    yield running, {"error": f"nothing within {piece_timeout_s:.0f} s: ended"}
                return
            if "begin" in message:
                if time.monotonic() >= deadline:
                    return
                running = message["begin"]
            else:
                running = None
                yield message["end"], message["result"]
        if running is not None:
            yield running, {"error": f"the process died, exit status {child.wait()}"}
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def _messages(child: subprocess.Popen[str], timeout_s: float) -> Iterator[dict[str, Any] | None]:
    """Yield what the child says; None where it said nothing for too long."""
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    pending = ""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout_s):
                yield None
                return
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk.decode(errors="replace")).split("\n")
            for line in lines:
                if line.startswith(MARK):
                    yield json.loads(line[len(MARK) :])
                else:
                    print(line, file=sys.stderr, flush=True)
