"""Opens what a worker keeps and runs of responses."""

from __future__ import annotations

import msgspec

from gateway.inference.services import GenerationServices
from gateway.resources import Resources
from gateway.responses.background import Background
from gateway.responses.conversations import ConversationStore
from gateway.responses.events import EventRows
from gateway.responses.running import RunningRows
from gateway.responses.store import PURPOSE, ResponseStore
from gateway.secret import Cipher
from gateway.settings.load import Settings

SECONDS_PER_DAY = 24 * 3600


class Responses(msgspec.Struct, frozen=True, kw_only=True):
    store: ResponseStore
    conversations: ConversationStore
    background: Background


def open_responses(
    settings: Settings, resources: Resources, services: GenerationServices
) -> Responses:
    """Open what is closed once the running generations were drained."""
    db, system_db = resources.db, resources.system_db
    cipher = Cipher(resources.secret, PURPOSE)
    conversations = ConversationStore(db=db, cipher=cipher)
    lifetime_s = settings.response_lifetime_days * SECONDS_PER_DAY
    store = ResponseStore(
        db=db,
        system_db=system_db,
        conversations=conversations,
        cipher=cipher,
        lifetime_s=lifetime_s,
    )
    rows = RunningRows(
        db=db,
        system_db=system_db,
        conversations=conversations,
        cipher=cipher,
        lifetime_s=lifetime_s,
    )
    events = EventRows(
        db=db,
        system_db=system_db,
        conversations=conversations,
        cipher=cipher,
        lifetime_s=lifetime_s,
    )
    background = Background(services, rows, events)
    background.start()
    resources.stack.push_async_callback(background.close)
    return Responses(store=store, conversations=conversations, background=background)
