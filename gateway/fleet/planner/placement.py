"""Places the engines of one machine on its devices, by the bytes that they take there.

Pure. An engine that runs stays where it is: its weights are loaded there, and to move is to start
again. The others are placed by first fit, decreasing: the largest first, each on the first device
with room, of which those come first that have the fewest engines of its model. Where more bytes fit
if each takes the first device with room whoever is there, that is done instead.

Nothing is moved. Where at least `LEAST_GAIN` more bytes would fit if all engines were placed anew,
those that find no room are told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gateway.settings.planner import Device

LEAST_GAIN = 0.1
"""The bytes that more fit, as a part of those that do, for which it is worth to place all anew."""


class DeviceClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Describes an engine that is to have a device."""

    engine: str
    model: str
    kind: str
    """The kind of device that it runs on."""
    bytes: int
    device: str | None = None
    """The one that it is on; None: it is on none yet."""


class Placement(msgspec.Struct, frozen=True):
    device: str | None
    """None: there is no room for it."""
    reason: str


def place_engines(claims: Sequence[DeviceClaim], devices: Sequence[Device]) -> dict[str, Placement]:
    """Return the device of each engine, and why it is that one. An engine that is on a device stays
    there, also on one that is not among `devices`."""
    kept = _place(claims, devices)
    if all(each.device is not None for each in kept.values()):
        return kept
    anew = _place([msgspec.structs.replace(each, device=None) for each in claims], devices)
    size = {each.engine: each.bytes for each in claims}
    before, after = (_placed_bytes(size, each) for each in (kept, anew))
    if after - before < max(1, LEAST_GAIN * before):
        return kept
    hint = "; it fits if all engines are started anew"
    return {
        name: msgspec.structs.replace(each, reason=each.reason + hint)
        if each.device is None and anew[name].device is not None
        else each
        for name, each in kept.items()
    }


def _place(claims: Sequence[DeviceClaim], devices: Sequence[Device]) -> dict[str, Placement]:
    """Place those that are nowhere, in both ways, and return what places more bytes."""
    size = {each.engine: each.bytes for each in claims}
    ways = [_first_fit(claims, devices, spreads=spreads) for spreads in (True, False)]
    return max(ways, key=lambda way: _placed_bytes(size, way))


def _placed_bytes(size: Mapping[str, int], placed: Mapping[str, Placement]) -> int:
    return sum(size[name] for name, each in placed.items() if each.device is not None)


def _first_fit(
    claims: Sequence[DeviceClaim], devices: Sequence[Device], *, spreads: bool
) -> dict[str, Placement]:
    free = {each.name: each.bytes for each in devices}
    models: dict[str, list[str]] = {each.name: [] for each in devices}
    placed: dict[str, Placement] = {}

    def put(claim: DeviceClaim, device: str, reason: str) -> None:
        placed[claim.engine] = Placement(device, reason)
        if device in free:
            free[device] -= claim.bytes
            models[device].append(claim.model)

    for claim in claims:
        if claim.device is not None:
            put(claim, claim.device, "it runs there")
    new = [each for each in claims if each.device is None]
    for claim in sorted(new, key=lambda each: (-each.bytes, each.engine)):
        usable = [each.name for each in devices if each.kind == claim.kind]
        fitting = [name for name in usable if free[name] >= claim.bytes]
        if not fitting:
            placed[claim.engine] = Placement(None, _lack(claim, usable, free))
            continue
        device = fitting[0]
        if spreads:  # `min` returns the first of equals
            device = min(fitting, key=lambda name: models[name].count(claim.model))
        put(claim, device, _why(claim, device, usable, free, models))
    return placed


def _why(
    claim: DeviceClaim,
    device: str,
    usable: Sequence[str],
    free: Mapping[str, int],
    models: Mapping[str, Sequence[str]],
) -> str:
    """Say why an engine gets a device that has not taken it up yet."""
    size = f"it takes {_gib(claim.bytes)} of {_gib(free[device])} that were free"
    skipped = usable[: usable.index(device)]
    full = [name for name in skipped if free[name] < claim.bytes]
    others = [name for name in skipped if name not in full]
    parts = [size]
    if full:
        parts.append(f"{', '.join(full)} had too little")
    if others:
        parts.append(f"{', '.join(others)} had more engines of {claim.model}")
    return "; ".join(parts)


def _lack(claim: DeviceClaim, usable: Sequence[str], free: Mapping[str, int]) -> str:
    if not usable:
        return f"there is no device of kind {claim.kind}"
    left = ", ".join(f"{name} {_gib(max(0, free[name]))}" for name in usable)
    return f"it takes {_gib(claim.bytes)}; free are on {left}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
