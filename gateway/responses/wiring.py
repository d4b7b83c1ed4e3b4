"""Opens what a worker keeps and runs of responses."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.inference.services import GenerationServices
from gateway.request_log.writer import RequestLog
from gateway.responses.background import LOST_AFTER_S, Background
from gateway.responses.conversations import ConversationStore
from gateway.responses.events import EventRows
from gateway.responses.lost import LostResponseLog
from gateway.responses.running import RunningRows, next_lost
from gateway.responses.sealed_items import PURPOSE as ITEMS
from gateway.responses.sealed_items import ItemSeal
from gateway.responses.sealing import PURPOSE
from gateway.responses.store import ResponseStore
from gateway.secret import Cipher
from gateway.settings.load import Settings
from gateway.worker.resources import Resources

SECONDS_PER_DAY = 24 * 3600


class Responses(msgspec.Struct, frozen=True, kw_only=True):
    store: ResponseStore
    conversations: ConversationStore
    background: Background
    seal: ItemSeal
    refuses_hosted_tools: bool = False
    """A tool that the vendor's servers would run is refused; else the model is not shown it."""


def open_responses(
    settings: Settings,
    resources: Resources,
    services: GenerationServices,
    request_log: RequestLog,
) -> Responses:
    """Open what is closed once the running generations were drained."""
    db, cipher = resources.db, Cipher(resources.secret, PURPOSE)
    conversations = ConversationStore(db=db, cipher=cipher)
    shared: dict[str, Any] = {
        "db": db,
        "system_db": resources.system_db,
        "conversations": conversations,
        "cipher": cipher,
        "lifetime_s": settings.response_lifetime_days * SECONDS_PER_DAY,
    }
    store = ResponseStore(**shared)
    listener = resources.listener
    background = Background(
        services,
        RunningRows(**shared),
        EventRows(**shared),
        rest_s=listener.rest_s,
        lost=LostResponseLog(request_log, resources.telemetry.label),
    )
    listener.watch("lost responses", background.recover, next_lost(LOST_AFTER_S))
    background.start()
    resources.stack.push_async_callback(background.close)
    return Responses(
        store=store,
        conversations=conversations,
        background=background,
        seal=ItemSeal(Cipher(resources.secret, ITEMS)),
        refuses_hosted_tools=settings.compat.hosted_tools == "refuse",
    )
