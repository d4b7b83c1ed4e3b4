"""Validates in child processes that are killed when they take too long.

Look-around and back references need backtracking, which can take forever on a short text, and a
large value can take a second by any schema, during which the library lets nothing else run. Such a
value is checked in a child, one at a time; after a bounded number of seconds the child is killed
and the call fails. The child also limits its own processor time and memory, so that it ends if
nobody is left to kill it. Its environment is the module path and nothing more.

A frame on its pipes is four bytes of length, big endian, and JSON.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections import OrderedDict
from typing import Any, BinaryIO

import msgspec

from mcp_bridge.errors import ValidationTimedOut
from mcp_bridge.validation.arguments import CompiledSchema, Problem, check, compile_schema

TIMEOUT_S = 1.0
CHILDREN = 2
"""So that what one value holds up is not all there is."""
START_TIMEOUT_S = 30.0
MAX_WAITING = 64
MAX_FRAME_BYTES = 32 << 20
MAX_CHILD_BYTES = 1 << 30
MAX_CHILD_SCHEMAS = 64
LENGTH_BYTES = 4
READY = b"{}"


class Question(msgspec.Struct):
    digest: str
    schema: Any
    known: dict[str, Any]
    value: Any


class KillableValidator:
    """A validator in one child process, started when it is first needed; values wait in turn."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self.waiting = 0
        self.child: asyncio.subprocess.Process | None = None

    async def problems(self, compiled: CompiledSchema, value: object) -> tuple[Problem, ...]:
        """Return what `arguments.check` finds.

        Raises: ValidationTimedOut, if it takes longer than `timeout_s`, MAX_WAITING values wait
        already, or the child died.
        """
        if self.waiting >= MAX_WAITING:
            raise ValidationTimedOut("too many values wait for the process that checks them")
        question = msgspec.json.encode(
            Question(compiled.digest, compiled.schema, dict(compiled.known), value)
        )
        if len(question) > MAX_FRAME_BYTES:
            return (Problem("", "schema", f"more than {MAX_FRAME_BYTES} bytes"),)
        self.waiting += 1
        try:
            async with self._lock:
                return await self._check(question)
        finally:
            self.waiting -= 1

    async def _check(self, question: bytes) -> tuple[Problem, ...]:
        child = self.child or await self._start()
        answered = False
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await exchange(child, question)
                answered = True
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            raise ValidationTimedOut("the schema took too long on this value") from None
        finally:
            # The pipes of an interrupted exchange are out of step.
            if not answered:
                await self.close()
        return tuple(msgspec.json.decode(answer, type=list[Problem]))

    async def _start(self) -> asyncio.subprocess.Process:
        self.child = child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "mcp_bridge.validation.sandboxed_validator",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        ready = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await read(child) == READY
        except (TimeoutError, asyncio.IncompleteReadError):
            raise ValidationTimedOut("the process that checks values did not start") from None
        finally:
            if not ready:
                await self.close()
        return child

    async def close(self) -> None:
        """Kill the child, if there is one, and reap it."""
        child, self.child = self.child, None
        if child is None:
            return
        if child.returncode is None:
            child.kill()
        if child.stdin is not None:
            child.stdin.close()
        await asyncio.shield(child.wait())


class ValidatorPool:
    """Several validators, of which the one that fewest values wait for is asked."""

    def __init__(self, children: int = CHILDREN, *, timeout_s: float = TIMEOUT_S) -> None:
        self.validators = [KillableValidator(timeout_s=timeout_s) for _ in range(children)]

    async def problems(self, compiled: CompiledSchema, value: object) -> tuple[Problem, ...]:
        """Return what `arguments.check` finds. Raises: ValidationTimedOut."""
        least = min(self.validators, key=lambda one: one.waiting)
        return await least.problems(compiled, value)

    async def close(self) -> None:
        for one in self.validators:
            await one.close()


async def exchange(child: asyncio.subprocess.Process, question: bytes) -> bytes:
    assert child.stdin is not None
    child.stdin.write(len(question).to_bytes(LENGTH_BYTES, "big") + question)
    await child.stdin.drain()
    return await read(child)


async def read(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None
    length = int.from_bytes(await child.stdout.readexactly(LENGTH_BYTES), "big")
    return await child.stdout.readexactly(length)


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer each frame with one frame until there are no more; runs in the child."""
    kept: OrderedDict[str, CompiledSchema] = OrderedDict()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_CHILD_BYTES, MAX_CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    send(answers, READY)
    while header := questions.read(LENGTH_BYTES):
        frame = questions.read(int.from_bytes(header, "big"))
        allow_seconds(int(TIMEOUT_S) + 2)
        question = msgspec.json.decode(frame, type=Question)
        compiled = kept.get(question.digest)
        if compiled is None:
            compiled = kept[question.digest] = compile_schema(question.schema, question.known)
            if len(kept) > MAX_CHILD_SCHEMAS:
                kept.popitem(last=False)
        send(answers, msgspec.json.encode(check(compiled, question.value)))


def send(answers: BinaryIO, frame: bytes) -> None:
    answers.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
    answers.flush()


def allow_seconds(seconds: int) -> None:
    """Set how much processor time is left before the kernel ends the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
