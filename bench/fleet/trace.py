"""Reads traces of requests in Mooncake's format, and makes their like.

Mooncake's JSONL (github.com/kvcache-ai/Mooncake, FAST'25): a request a line, `timestamp` in
milliseconds, `input_length` and `output_length` in tokens, `hash_ids`: an id for each block of
BLOCK_TOKENS tokens of the prompt; equal ids stand for equal blocks behind equal ones.

A made trace has the statistics that are published of one: quantiles of lengths, the rate, how much
of all prompts an infinite cache would have had, how often blocks are used. It is made of sessions,
each turn of which repeats all that was said before. Each turn draws a number, those of a session
alike, of longer sessions larger; by their order over the whole trace they get the lengths of the
published quantiles, exactly.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

BLOCK_TOKENS = 512
GRID_S = 3.0
"""Mooncake's timestamps lie on a grid of so many seconds."""

Quantiles = Sequence[tuple[float, float]]
"""Points of a distribution: a share of all, and the length that so many are not above."""


class TraceError(ValueError):
    """A line of a trace that cannot be read; names it and its field."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[int]


class TracedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request of a trace. `hash_ids`: of each block of its prompt, the last one perhaps not
    full."""

    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class TraceShape(msgspec.Struct, frozen=True, kw_only=True):
    """The published statistics of a trace, and what of sessions makes the rest of them."""

    name: str
    num_requests: int
    duration_s: float
    inputs: Quantiles
    outputs: Quantiles
    single_turns: float
    """The share of sessions with one turn."""
    turn_tail: float
    """The exponent of the number of turns of longer ones: the larger, the fewer."""
    max_turns: int
    likeness: float
    """The correlation of the lengths of one session's turns, 0 to 1."""
    length_bias: float = 0.0
    """How much longer the prompts of sessions with many turns are: standard deviations for each
    doubling."""
    gap_s: float
    """The median time between two turns."""
    has_system_prompt: bool = False
    """The first block is the same for all."""


CONVERSATION = TraceShape(
    name="conversation",
    num_requests=12_031,
    duration_s=3_537.0,
    inputs=(
        *((0.0, 600), (0.5, 6_909), (0.9, 27_367)),
        *((0.96, 36_500), (0.99, 85_399), (1.0, 126_195)),
    ),
    outputs=((0.0, 10), (0.1, 60), (0.5, 350), (0.9, 597), (0.99, 1_115), (1.0, 2_000)),
    single_turns=0.71,
    turn_tail=1.5,
    max_turns=43,
    likeness=0.85,
    gap_s=180.0,
    has_system_prompt=True,
)
DOCUMENTS = TraceShape(
    name="synthetic",
    num_requests=3_993,
    duration_s=1_022.0,
    inputs=(
        (0.0, 900),
        (0.5, 11_587),
        (0.75, 19_000),
        (0.9, 38_596),
        (0.99, 66_456),
        (1.0, 90_000),
    ),
    outputs=((0.0, 4), (0.5, 69), (0.9, 389), (0.99, 1_000), (1.0, 2_000)),
    single_turns=0.75,
    turn_tail=1.2,
    max_turns=24,
    likeness=0.97,
    length_bias=0.8,
    gap_s=50.0,
)


class TraceStatistics(msgspec.Struct, frozen=True):
    """The statistics that are published of a trace."""

    requests: int
    duration_s: float
    input_mean: float
    input_p50: int
    input_p90: int
    input_p99: int
    output_mean: float
    output_p50: int
    blocks: int
    used_once: float
    """The share of distinct blocks that one request has."""
    first_blocks: int
    most_used: int
    """Requests that have the block which most have, the first block aside where all have it."""
    hits: float
    """The share of all blocks that an infinite cache would have had."""


def read_trace(path: Path) -> list[TracedRequest]:
    """Read Mooncake's JSONL, its first request at 0. Requests of one timestamp are spread evenly
    until the next one; an answer has a token at least, the one that the prompt brings. Raises:
    TraceError."""
    decoder = msgspec.json.Decoder(_Line)
    lines: list[_Line] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    lines.append(_read_line(decoder, text, f"{path}:{number}", number))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if not lines:
        raise TraceError(f"{path}: no request")
    return [*_spread(sorted(lines, key=lambda line: line.timestamp))]


def _read_line(decoder: msgspec.json.Decoder[_Line], text: bytes, place: str, number: int) -> _Line:
    try:
        line = decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(f"{place}: {error}") from None
    wanted, found = -(-line.input_length // BLOCK_TOKENS), len(line.hash_ids)
    if found == line.input_length // BLOCK_TOKENS < wanted:
        line.hash_ids.append(-number)  # the end of the prompt, which is nobody else's
    elif found != wanted:
        raise TraceError(
            f"{place}: hash_ids has {found} blocks; input_length {line.input_length} makes {wanted}"
        )
    line.output_length = max(1, line.output_length)
    return line


def write_trace(requests: Iterable[TracedRequest], path: Path) -> None:
    encode = msgspec.json.encode
    with path.open("wb") as file:
        for each in requests:
            line: dict[str, Any] = {
                "timestamp": round(1000 * each.arrival_s),
                "input_length": each.input_length,
                "output_length": each.output_length,
                "hash_ids": each.hash_ids,
            }
            file.write(encode(line) + b"\n")


def _spread(lines: list[_Line]) -> Iterator[TracedRequest]:
    groups = [[*group] for _, group in groupby(lines, key=lambda line: line.timestamp)]
    began = lines[0].timestamp
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        start_s = (group[0].timestamp - began) / 1000
        end_s = start_s + GRID_S if following is None else (following[0].timestamp - began) / 1000
        for at, line in enumerate(group):
            arrival_s = start_s + (end_s - start_s) * at / len(group)
            yield TracedRequest(
                arrival_s, line.input_length, line.output_length, tuple(line.hash_ids)
            )


class _Turn(msgspec.Struct):
    """A turn before it has a length. `rank`: orders all turns of a trace by it."""

    session: int
    arrival_s: float
    rank: float
    length: int = 0


def make_trace(shape: TraceShape, seed: int) -> list[TracedRequest]:
    """Make a trace of that shape: as many requests in the same time, by arrival."""
    rng, sessions = random.Random(f"{seed} {shape.name}"), count()
    turns: list[_Turn] = []
    while len(turns) < shape.num_requests:
        # Sessions begin before the trace does, so that its beginning is as its middle.
        turns += (
            turn
            for turn in _session(shape, rng, next(sessions))
            if 0 <= turn.arrival_s < shape.duration_s
        )
    turns = turns[: shape.num_requests]
    for place, turn in enumerate(sorted(turns, key=lambda each: each.rank)):
        turn.length = round(at(shape.inputs, (place + 0.5) / len(turns)))
    fresh, known = count(1), dict[int, list[int]]()
    first = [0] if shape.has_system_prompt else []
    requests: list[TracedRequest] = []
    for turn in sorted(turns, key=lambda each: each.arrival_s):
        full = turn.length // BLOCK_TOKENS
        blocks = known.get(turn.session, first)[:full]
        blocks += [next(fresh) for _ in range(full - len(blocks))]
        known[turn.session] = blocks
        rest = [next(fresh)] if turn.length % BLOCK_TOKENS else []
        output = round(at(shape.outputs, rng.random()))
        requests.append(TracedRequest(turn.arrival_s, turn.length, output, (*blocks, *rest)))
    return requests


def _session(shape: TraceShape, rng: random.Random, number: int) -> Iterator[_Turn]:
    turns = 1
    if rng.random() >= shape.single_turns:
        turns = min(shape.max_turns, 1 + math.ceil(rng.paretovariate(shape.turn_tail)))
    alike, own = math.sqrt(shape.likeness), math.sqrt(1 - shape.likeness)
    size = rng.gauss(0, 1) + shape.length_bias * math.log2(turns)
    arrival_s = rng.uniform(-10 * shape.gap_s, shape.duration_s)
    for rank in sorted(alike * size + own * rng.gauss(0, 1) for _ in range(turns)):
        yield _Turn(number, arrival_s, rank)
        arrival_s += rng.lognormvariate(math.log(shape.gap_s), 1.0)


def at(quantiles: Quantiles, rank: float) -> float:
    """Return the length at a share of a distribution: between two points on a straight line over
    the logarithm."""
    behind = min(bisect_right(quantiles, (rank, math.inf)), len(quantiles) - 1)
    (low, shortest), (high, longest) = quantiles[behind - 1], quantiles[behind]
    part = (rank - low) / (high - low)
    return math.exp((1 - part) * math.log(shortest) + part * math.log(longest))


def statistics_of(requests: Sequence[TracedRequest]) -> TraceStatistics:
    inputs = sorted(each.input_length for each in requests)
    outputs = sorted(each.output_length for each in requests)
    uses = Counter(block for each in requests for block in each.hash_ids)
    total, number = uses.total(), len(requests)
    shared = [times for times in uses.values() if times < number]
    return TraceStatistics(
        requests=number,
        duration_s=requests[-1].arrival_s,
        input_mean=sum(inputs) / number,
        input_p50=inputs[number // 2],
        input_p90=inputs[9 * number // 10],
        input_p99=inputs[99 * number // 100],
        output_mean=sum(outputs) / number,
        output_p50=outputs[number // 2],
        blocks=len(uses),
        used_once=sum(times == 1 for times in uses.values()) / len(uses),
        first_blocks=len({each.hash_ids[0] for each in requests}),
        most_used=max(shared, default=0),
        hits=(total - len(uses)) / total,
    )
