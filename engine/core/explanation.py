"""Explains an engine's configuration: each option with its value and where that came from, and
which product multiplies for which shape, with the times that decided it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.config import ResolvedConfig
from engine.kernels.choice.machine import this_machine
from engine.kernels.choice.microkernel import microkernel
from engine.kernels.choice.products import LIBRARY, OWN, choices
from engine.options import engine_options

DERIVED = {
    "device": ("device", "what this machine has"),
    "dtype": ("dtype", "the checkpoint and the device"),
    "max_model_len": ("max_model_len", "the checkpoint, cut to what the KV cache holds"),
    "num_blocks": ("num_blocks", "free memory or the KV options"),
    "step_timeout_s": ("step_timeout_s", "the model's size"),
}
"""Options that are resolved when an engine starts: the field with the result, and what it is made
of where nothing was asked for."""


def explain(resolved: ResolvedConfig) -> str:
    """Return the tables for a person, of an engine that has started in this process."""
    machine = this_machine()
    features = " ".join(machine.features) or "none of those that are asked for"
    lines = [
        f"{resolved.served_name} on {machine.processor}",
        f"features: {features}",
        f"cores: {machine.cores}, threads: {machine.threads}, torch {machine.torch}",
        "",
        *_aligned([("option", "value", "from"), *_options(resolved, machine.threads)]),
        "",
        *_products(resolved),
    ]
    return "\n".join(lines)


def _options(resolved: ResolvedConfig, threads: int) -> Iterator[tuple[str, str, str]]:
    for option in engine_options():
        asked = getattr(resolved.config, option.name)
        is_default = asked == option.default
        value, source = asked, "default" if is_default else "asked for"
        if option.name in DERIVED and (is_default or option.name == "device"):
            field, made_of = DERIVED[option.name]
            value = getattr(resolved, field)
            source = made_of if is_default else source
        elif option.name == "num_threads" and asked is None:
            value, source = threads, "torch, from the cores of this process"
        yield option.name, _value(value), source


def _products(resolved: ResolvedConfig) -> Iterator[str]:
    if found := choices():
        rows: list[tuple[str, ...]] = [("product", OWN, LIBRARY, "taken", "from")]
        for choice in found:
            times = [_time(choice.times.get(way)) for way in (OWN, LIBRARY)]
            rows.append((choice.question, *times, choice.way, choice.came_from))
        yield from _aligned(rows)
        yield "Times are of one thread's processor time, on a part of a large weight."
        return
    yield f"Products: {_unmeasured(resolved)}"


def _unmeasured(resolved: ResolvedConfig) -> str:
    """Say why there was nothing to measure."""
    if resolved.device != "cpu":
        return f"kernels for {resolved.device}, not measured when an engine starts"
    if resolved.config.deterministic:
        return f"{OWN}, always: --deterministic keeps one"
    if resolved.dtype != "bfloat16":
        return f"{OWN}, always: in {resolved.dtype} they were never slower"
    if microkernel() is None:
        return "one of each kind: torch's library has none for this processor"
    return f"{OWN}: the model's weights are small"


def _value(value: object) -> str:
    if value is None:
        return "unset"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:,.0f} us"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as their widest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
