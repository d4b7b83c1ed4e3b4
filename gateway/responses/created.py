"""Describes a response that can be started: what it is asked, and whose it is."""

from __future__ import annotations

import msgspec

from gateway.inference.calls import GenerationCall
from gateway.inference.delivery import Delivery
from gateway.inference.generate import start
from gateway.inference.services import GenerationServices
from gateway.responses.kept import ResponseOwner
from gateway.tools.loop import LoopCall, start_loop
from gateway.wire.openai_responses.items import Item
from gateway.wire.openai_responses.to_responses import ResponseEncoder


class StartableResponse(msgspec.Struct, frozen=True, kw_only=True):
    call: GenerationCall
    encoder: ResponseEncoder
    owner: ResponseOwner
    given: tuple[Item, ...]
    """What it adds to what it continues."""
    in_background: bool
    is_streamed: bool = False
    """Whoever asks follows it."""
    loop: LoopCall | None = None
    """Its tools are called here."""

    def start(self, services: GenerationServices) -> Delivery:
        return start(services, self.call) if self.loop is None else start_loop(services, self.loop)
