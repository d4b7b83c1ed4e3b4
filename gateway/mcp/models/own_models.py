"""Sends a request of an MCP caller to a model of this gateway and returns the whole answer. It is
like any other request of theirs: admitted by their limits, caps and permitted models, and on their
bill."""

from __future__ import annotations

from asyncio import CancelledError

import msgspec

from gateway.inference.calls import RequestContext, to_call
from gateway.inference.generate import start
from gateway.inference.services import GenerationServices
from gateway.mcp.metered import Callers
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from gateway.wire.surfaces import ApiSurface
from mcp_bridge.caller import Caller


class OwnModels(msgspec.Struct, frozen=True):
    """The models of this gateway, for MCP callers. `callers`: who they are to limits and bills."""

    services: GenerationServices
    telemetry: Telemetry
    callers: Callers

    async def ask(
        self,
        caller: Caller,
        surface: ApiSurface,
        model: str,
        request_id: str,
        body: bytes,
        *,
        deadline_s: float,
    ) -> bytes | None:
        """Return the answer as JSON; None: it was given up. A cancelled caller abandons it. Raises:
        RpcError (the caller has left), what requests raise."""
        principal = self.callers.principal_of(caller)
        route = self.services.fleet.resolve(model, principal)
        context = RequestContext(
            request_id=request_id,
            principal=principal,
            meter=RequestMeter(self.telemetry, model),
            body=body,
            route=route,
            deadline_s=deadline_s,
        )
        generate = surface.read(body, route.dialect)
        call = to_call(self.services, surface, context, generate)
        delivery = start(self.services, call)
        try:
            return await delivery.next()
        except CancelledError:
            delivery.abandon()
            raise
