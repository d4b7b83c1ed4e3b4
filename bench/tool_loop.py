"""Measure what rounds of a tool loop compute: with the real engine on penny, of each only what is
new.

`python -m bench.tool_loop [--conversations N] [--dry]`: starts an MCP server that costs nothing
(`bench.tools.mcp_upstream`) and `tollgate up` with penny, and asks for N chat completions whose
model has to call its tool, each with a system prompt and a history of its own. Every round is an
event of its own on the bill, which says how much of its prompt was computed and how much was
cached. The claim: of a round behind another at most its new tokens, those behind the prompt and the
answer of the round before, and BLOCK_SIZE are computed. Beside it stands what would be computed
without a cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvloop

from bench.gateway import share_cores
from bench.mcp import Gateway, fetch, gateway, upstream
from bench.tools.mcp_upstream import ARGUMENTS, REPORT, TOOL
from bench.tools.record import record
from engine.config import BLOCK_SIZE
from gateway.home import Home

MODEL = """
[[model]]
name = "penny"
path = "models/penny"
"""
BOOKED_WITHIN_S = 60.0
TIMEOUT_S = 120.0
NUM_TURNS = 4
"""The turns of a conversation before the measured request."""
TEMPERATURE = 0.8
"""So that some go on calling, and the loops have several lengths."""
MIN_ROUNDS = 2
"""A loop whose model has to call has one in which it does, and the next."""


class Round(NamedTuple):
    """Tokens of one, as they are billed."""

    computed: int
    cached: int
    written: int

    @property
    def prompt(self) -> int:
        return self.computed + self.cached


def new_tokens(rounds: Sequence[Round]) -> list[int]:
    """Count for each round but the first what stands behind the round before and its answer."""
    return [
        after.prompt - before.prompt - before.written
        for before, after in itertools.pairwise(rounds)
    ]


def excess(rounds: Sequence[Round]) -> list[int]:
    """Count for each round but the first what was computed beyond what is new."""
    return [
        each.computed - max(0, new)
        for each, new in zip(rounds[1:], new_tokens(rounds), strict=True)
    ]


def conversation(number: int) -> list[dict[str, Any]]:
    """Turns that call, so that a small model does as it did."""
    said: list[dict[str, Any]] = [
        {"role": "system", "content": f"You look the weather up, as the {number}th of us."}
    ]
    for turn in range(NUM_TURNS):
        call = {"name": f"new__{TOOL}", "arguments": json.dumps(ARGUMENTS)}
        id_ = f"call_{turn}"
        said += [
            {"role": "user", "content": f"How warm is it in Bern on day {turn} of {number}?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": id_, "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": id_, "content": json.dumps(REPORT)},
        ]
    return [*said, {"role": "user", "content": "And now? Look it up again, and again."}]


def ask(http: httpx.Client, number: int) -> str:
    """The id of the request. Raises: SystemExit."""
    body = {
        "model": "penny",
        "messages": conversation(number),
        "tools": [{"type": "mcp", "server_label": "new", "require_approval": "never"}],
        "tool_choice": "required",
        "temperature": TEMPERATURE,
        "seed": number,
        "max_tokens": 400,
    }
    answer = http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise SystemExit(f"{answer.status_code} {answer.text[:2000]}")
    return str(answer.headers["x-request-id"])


def booked(home: Home, request_id: str) -> list[Round]:
    query = (
        "SELECT uncached_input, cache_read, output FROM usage_events"
        f" WHERE request_id = '{request_id}' AND model = 'penny' ORDER BY id"
    )
    deadline = time.monotonic() + BOOKED_WITHIN_S
    before = -1
    while True:
        found = uvloop.run(fetch(home, query))
        if len(found) >= MIN_ROUNDS and len(found) == before:
            return [Round(*map(int, row)) for row in found]
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(found)} rounds of {request_id} are on the bill")
        before = len(found)
        time.sleep(0.3)  # rounds are shipped together; where no more came, there are no more


def measure(at: Gateway, count: int) -> list[list[Round]]:
    headers = {"authorization": f"Bearer {at.key}"}
    with httpx.Client(base_url=at.base, headers=headers, timeout=TIMEOUT_S) as http:
        ids = [ask(http, number) for number in range(count)]
    return [booked(at.home, each) for each in ids]


def summary(loops: Iterable[Sequence[Round]]) -> dict[str, Any]:
    found = list(loops)
    later = [each for rounds in found for each in rounds[1:]]
    over = [each for rounds in found for each in excess(rounds)]
    return {
        "loops": len(found),
        "rounds": [len(rounds) for rounds in found],
        "later_rounds": len(later),
        "prompt_tokens": statistics.median(each.prompt for each in later),
        "new_tokens": statistics.median(n for rounds in found for n in new_tokens(rounds)),
        "computed_tokens": statistics.median(each.computed for each in later),
        "share_computed": round(
            sum(each.computed for each in later) / sum(each.prompt for each in later), 4
        ),
        "most_beyond_new": max(over),
        "claims": {f"at_most_new_and_{BLOCK_SIZE}": max(over) <= BLOCK_SIZE},
    }


def table(result: Mapping[str, Any]) -> str:
    return (
        f"{result['loops']} loops, {result['later_rounds']} rounds behind another: a prompt of "
        f"{result['prompt_tokens']} tokens, {result['new_tokens']} of them new, "
        f"{result['computed_tokens']} computed (medians); at most {result['most_beyond_new']} "
        f"beyond what is new, to reach <= {BLOCK_SIZE}; {result['share_computed']:.1%} of all "
        "prompts were computed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    served, loaded = share_cores()
    os.sched_setaffinity(0, loaded)
    with tempfile.TemporaryDirectory(prefix="tg-bench-", dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        url = stack.enter_context(upstream(folder, loaded))
        scopes = ("mcp:call", "inference")
        at = stack.enter_context(gateway(folder, url, served, loaded, models=MODEL, scopes=scopes))
        result = summary(measure(at, options.conversations))
    print(table(result))
    print(json.dumps(result))
    if not options.dry:
        print(record("tool_loop", result))
    if not all(result["claims"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
