"""Gives engines their devices by `fleet.planner.placement`, and has their processes run there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from engine.options import EngineOptions
from gateway.fleet.planner.machine import weights_bytes
from gateway.fleet.planner.placement import DeviceClaim, Placement, place_engines
from gateway.fleet.planner.view import PlacedEngine
from gateway.processes.restarter import StartError
from gateway.settings.models import ModelConfig
from gateway.settings.planner import PlannerConfig, device_kind

VISIBLE = "CUDA_VISIBLE_DEVICES"


class EngineDevice(msgspec.Struct, frozen=True):
    """The device that an engine has as long as it lives, or why there is none for it."""

    claim: DeviceClaim
    """With the device."""
    placement: Placement

    def shown(self, engine: str) -> PlacedEngine | None:
        """Return what operators are told of the engine of that name; None: it has no device."""
        device = self.placement.device
        if device is None:
            return None
        reason = self.placement.reason
        return PlacedEngine(engine=engine, device=device, bytes=self.claim.bytes, reason=reason)


def devices_of(
    fresh: Mapping[str, ModelConfig], others: Iterable[EngineDevice | None], planner: PlannerConfig
) -> dict[str, EngineDevice]:
    """Return the devices of engines that are begun, by address; of none that is not placed.
    `others`: those of all that have not ended."""
    wanted = [
        claim
        for address, model in fresh.items()
        if (claim := claim_of(model, address, planner)) is not None
    ]
    there = [each.claim for each in others if each is not None and each.claim.device is not None]
    placements = place_engines([*there, *wanted], planner.devices)
    found = {}
    for claim in wanted:
        placement = placements[claim.engine]
        placed = msgspec.structs.replace(claim, device=placement.device)
        found[claim.engine] = EngineDevice(placed, placement)
    return found


def claim_of(model: ModelConfig, address: str, planner: PlannerConfig) -> DeviceClaim | None:
    """Return what an engine of a model takes on its device; None: it is not placed on any."""
    options = model.engine_options
    kind = device_kind(options.device, planner.devices)
    if kind is None:
        return None
    assert options.kv_cache_bytes is not None  # the settings were refused without
    folders = (model.path, options.draft_model, *(each.path for each in model.adapters))
    weights = sum(weights_bytes(each) for each in folders)
    return DeviceClaim(
        engine=address,
        model=model.name,
        kind=kind,
        bytes=weights + options.kv_cache_bytes + planner.step_bytes,
    )


def options_on(options: EngineOptions, device: str) -> EngineOptions:
    """Return the options of an engine that runs on a device."""
    kind = "cpu" if device == "cpu" else "cuda"
    return msgspec.structs.replace(options, device=kind)


def variables_on(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables by which an engine finds that device alone. `environ`: that
    of `tollgate up`, which may see some devices only. Raises: StartError."""
    if device == "cpu":
        return {}
    number = int(device.partition(":")[2])
    if (seen := environ.get(VISIBLE)) is None:
        return {VISIBLE: str(number)}
    visible = [each.strip() for each in seen.split(",") if each.strip()]
    if number >= len(visible):
        raise StartError(f"fleet.planner.devices: {device} is not among {VISIBLE}={seen}")
    return {VISIBLE: visible[number]}
