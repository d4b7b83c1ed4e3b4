"""A process that compiles a grammar first, so that one which takes for ever costs that process and
not the engine.

Above: `grammar_compiler.py`. Below: `grammar.py`. A compilation cannot be interrupted, and what
bounds it has holes. The process is started when it is first needed and again when it died; it ends
with its stdin, that is with whoever started it. Lines of JSON pass: the vocabulary, then grammars
one by one, each answered by what is wrong with it, or null.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import msgspec

from engine.errors import InvalidRequest
from engine.protocol import Grammar
from engine.runner.grammar import MatcherTokenizer, Vocabulary, compile_grammar

MAX_CPU_S = 1.0
"""Of a compilation, on one processor; some hundred times what a large schema takes."""
MAX_MEMORY_BYTES = 1024**3
"""Beside the tokenizer; virtual."""


class GrammarTrial:
    """Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> None:
        """InvalidRequest unless the grammar compiles within the bounds."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:  # it died since it was asked whether it lives
            answer = b""
        if not answer:
            process.wait()
            raise InvalidRequest(
                f"grammar takes more than {MAX_CPU_S:g} s or too much memory to compile",
                param="grammar",
            )
        message = msgspec.json.decode(answer, type=str | None)
        if message is not None:
            raise InvalidRequest(message, param="grammar")

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._vocabulary) + b"\n")
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.kill()


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
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


def _bound_memory() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


if __name__ == "__main__":
    main()
