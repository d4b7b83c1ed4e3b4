"""A process that compiles a grammar first, so that one which takes for ever costs that process and
not the engine.

A compilation cannot be interrupted, and what bounds it has holes. The process is started when it is
first needed and again when it died; it ends with its stdin, that is with whoever started it. Lines
of JSON pass: the vocabulary, then grammars one by one, each answered by what is wrong with it, or
null.

Only where it died of a grammar is the grammar refused for it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import msgspec

from engine.errors import EngineOverloaded, InvalidRequest
from engine.protocol import Grammar
from engine.runner.grammar.constraint import MatcherTokenizer, Vocabulary, compile_grammar

MAX_CPU_S = 1.0
"""The processor time of a compilation, on one core; some hundred times what a large schema
takes."""
MAX_MEMORY_BYTES = 1024**3
"""The virtual memory that a compilation may take, beside the tokenizer's."""
TOO_MUCH = f"grammar takes more than {MAX_CPU_S:g} s or too much memory to compile"
OF_THE_GRAMMAR = frozenset((-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV))
"""Return codes: out of time, of memory, of stack. Of anything else, such as being killed where the
system is short of memory, it need not die again."""


class GrammarTrial:
    """Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GrammarTrial] | None = None

    def check(self, grammar: Grammar) -> None:
        """InvalidRequest unless the grammar compiles within the bounds. EngineOverloaded where that
        could not be found out, which says nothing of the grammar."""
        process = self._process
        if process is not None and process.poll() is not None:
            self._give_back()
            process = None
        process = process or self._start()
        answer = self._ask(process, grammar)
        if not answer.endswith(b"\n"):
            returncode = process.wait()
            self._give_back()
            if returncode in OF_THE_GRAMMAR:
                raise InvalidRequest(TOO_MUCH, param="grammar")
            raise EngineOverloaded(f"the process that tries grammars was lost ({returncode})")
        message = msgspec.json.decode(answer, type=str | None)
        if message is not None:
            raise InvalidRequest(message, param="grammar")

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:  # out of descriptors, memory or processes: for now
            message = f"no process can be started to try a grammar in ({error})"
            raise EngineOverloaded(message) from error
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._vocabulary) + b"\n")  # not flushed yet
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], grammar: Grammar) -> bytes:
        """A line, or what there is of it where the process died."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # it died since it was asked whether it lives
            return b""
        return process.stdout.readline()

    def _give_back(self) -> None:
        """Give back what a process takes here. The finalizer would keep it as long as this."""
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # What was written and never read, closing tries to write again.
    with contextlib.suppress(BrokenPipeError), process:
        pass


def main() -> None:
    """The process: until stdin ends, or a compilation goes beyond its bounds."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: who started it decides
    vocabulary = msgspec.json.decode(sys.stdin.buffer.readline(), type=Vocabulary)
    tokenizer: MatcherTokenizer | None = None
    for line in sys.stdin.buffer:
        message = None
        try:
            if tokenizer is None:
                tokenizer = MatcherTokenizer(vocabulary)
                _bound_memory()
            grammar = msgspec.json.decode(line, type=Grammar)
            # Its default action ends the process, whatever it is doing. Processor time: on a busy
            # machine a good grammar is not refused for being slow.
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
            compile_grammar(grammar, tokenizer)
        except InvalidRequest as error:
            message = error.message
        except MemoryError:
            os.abort()  # as the library does
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


def _bound_memory() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


if __name__ == "__main__":
    main()
