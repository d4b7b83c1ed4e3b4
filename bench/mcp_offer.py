"""Measure what a person waits for who looks at what an MCP server offers: pins, comparison, scan.

`python -m bench.mcp_offer [--tools N] [--megabytes M] [--dry]`: makes offers of N/10 and N tools
(10,000), and one of a few tools of M MB (10) in all, and takes the processor time of each stage in
one run:

- `pin`: from what was read to its pins;
- `compare`: with N approved tools of which each has changed, beside another server's;
- `first page`: the findings and differences of 500 changes, which is what is shown at once;
- `all`: the findings of all changes, which an approval of everything reads.

Each stage reads its input once: ten times as many tools may take FACTOR times as long at most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.tools.record import record
from gateway.mcp.admin.pins_admin import SCANNED, compared
from gateway.routes.mcp.pins import page_of, to_offer
from mcp_bridge.pinning import ApprovedPins, offer_of
from mcp_bridge.trust.scan import LabelledPin, known_suspicions
from mcp_bridge.upstream.upstream import ServerConfig

NUM_TOOLS = 10_000
MEGABYTES = 10.0
FACTOR = 14.0
"""Ten, and what caches and a busy machine take."""
WORDS = (
    "list get create update delete issue repository branch file user team project page comment "
    "label order invoice search query status report task event calendar message channel"
).split()
CONFIG = ServerConfig(name="large", url="https://large.example/mcp")
LARGE_TOOLS = 20


def said(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words)) + "."


def tool(draw: random.Random, number: int) -> dict[str, Any]:
    properties = {
        f"{draw.choice(WORDS)}_{at}": {"type": "string", "description": said(draw, 8)}
        for at in range(5)
    }
    return {
        "name": f"{draw.choice(WORDS)}_{draw.choice(WORDS)}_{number}",
        "description": said(draw, 60),
        "inputSchema": {"type": "object", "properties": properties},
    }


def large_tool(draw: random.Random, number: int, num_bytes: float) -> dict[str, Any]:
    """Return a tool of about so many bytes of JSON, which are short texts."""
    made, choices, size = tool(draw, number), list[str](), 0
    while size < num_bytes:
        choices.append(said(draw, 6))
        size += len(choices[-1]) + len('"",')
    return {**made, "_meta": {"choices": choices}}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    found = work()
    return time.process_time() - begun, found


def stages(tools: list[dict[str, Any]]) -> dict[str, float]:
    """Return the processor seconds of each stage, with nothing known from before."""
    SCANNED.clear()
    known_suspicions.cache_clear()
    before = offer_of(("tool", each) for each in tools)
    others = [LabelledPin("other", pin) for pin in list(before.pins.values())[:100]]
    now = [{**each, "description": f"{each['description']} More."} for each in tools]
    pin_s, offer = timed(lambda: offer_of(("tool", each) for each in now))
    compare_s, seen = timed(lambda: compared(CONFIG, ApprovedPins(before.pins), offer, others))
    page_s, _ = timed(lambda: to_offer(seen, page_of(seen)))
    all_s, _ = timed(lambda: sum(1 for _ in seen.found()))
    return {"pin": pin_s, "compare": compare_s, "first page": page_s, "all": all_s + page_s}


def measure(num_tools: int, megabytes: float) -> dict[str, Any]:
    draw = random.Random(1)
    few = stages([tool(draw, number) for number in range(num_tools // 10)])
    many = stages([tool(draw, number) for number in range(num_tools)])
    each_bytes = megabytes * 1e6 / LARGE_TOOLS
    large = stages([large_tool(draw, number, each_bytes) for number in range(LARGE_TOOLS)])
    growth = {name: many[name] / max(few[name], 1e-3) for name in ("pin", "compare", "all")}
    asked = {"tools": num_tools, "large_mb": megabytes}
    return {**asked, "few": few, "many": many, "large": large, "growth": growth}


def is_linear(result: Mapping[str, Any]) -> bool:
    return all(each <= FACTOR for each in result["growth"].values())


def table(result: Mapping[str, Any]) -> str:
    large = f"{result['large_mb']:g} MB"
    rows = [f"{'processor seconds':20}{'N/10':>10}{'N':>10}{large:>10}"]
    rows += [
        f"{name:20}{result['few'][name]:10.3f}{result['many'][name]:10.3f}{result['large'][name]:10.3f}"
        for name in result["few"]
    ]
    growth = json.dumps({name: round(each, 1) for name, each in result["growth"].items()})
    return "\n".join([*rows, f"growth {growth}: {'linear' if is_linear(result) else 'NOT LINEAR'}"])


def rounded(result: Any) -> Any:
    """Return a result whose figures have the digits that mean something."""
    if isinstance(result, Mapping):
        return {name: rounded(each) for name, each in result.items()}
    return round(result, 4) if isinstance(result, float) else result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", type=int, default=NUM_TOOLS)
    parser.add_argument("--megabytes", type=float, default=MEGABYTES)
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    given = parser.parse_args()
    load_average = round(os.getloadavg()[0], 2)
    measured = measure(given.tools, given.megabytes)
    result = rounded({"load_average_before": load_average} | measured)
    print(table(result))
    print(json.dumps(result))
    if not given.dry:
        print(record("mcp-offer", result))
        sys.exit(0 if is_linear(measured) else 1)


if __name__ == "__main__":
    main()
