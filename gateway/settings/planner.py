"""Says who decides how many engines models have and on which devices they run, as `[fleet.planner]`
has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

DEVICE_PATTERN = r"^(?:cpu|cuda:(?:0|[1-9][0-9]{0,2}))\Z"
Bytes = Annotated[int, Meta(ge=0, le=10**15)]


class Device(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device of this machine that engines are placed on."""

    name: Annotated[str, Meta(pattern=DEVICE_PATTERN)]
    """`cpu`, or `cuda:N` as programs that `tollgate up` starts would number it."""
    bytes: Bytes
    """The memory for engines."""

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


class PlannerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fleet.planner]`: who decides how many engines a model has with a range of them."""

    mode: Literal["off", "dry-run", "on"] = "on"
    """`off`: each such model has as many as at the start. `dry-run`: what would be done is said,
    and stands in the audit log, but is not done."""
    interval_s: Annotated[float, Meta(ge=0.1, le=300)] = 5.0
    """Between two decisions."""
    cooldown_s: Annotated[float, Meta(ge=0, le=86_400)] = 120.0
    """Fewer are wanted once no more were needed for so long."""
    idle_s: Annotated[float, Meta(ge=1, le=7 * 86_400)] = 900.0
    """A model whose range begins at 0 has no engine any more once nothing was asked of it for so
    long."""
    starts_at_once: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Engines of this machine that may be starting at a time, of all models together; others wait
    for their turn. None: as many as it has processors, of which each keeps about one busy."""
    devices: Annotated[tuple[Device, ...], Meta(max_length=64)] = ()
    """Engines that are started here are placed on these by their bytes. Empty: each takes the
    device that it finds."""
    step_bytes: Bytes = 2**30
    """The memory of an engine on its device beside weights and KV cache: the libraries, and the
    tensors of a step."""


def device_kind(option: str, devices: Sequence[Device]) -> str | None:
    """Return the kind of the devices that an engine is placed on whose `device` is `option`; None:
    on none of these. `auto` is a CUDA device where there is one, as engines have it."""
    kinds = {each.kind for each in devices}
    if option == "auto":
        option = "cuda" if "cuda" in kinds else "cpu"
    return option if option in kinds else None
