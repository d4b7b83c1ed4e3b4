"""Lists what `test_tenant_methods` tries of events that are followed, with the ids of Alice."""

from __future__ import annotations

import asyncio
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.responses.conversations import ConversationStore
from gateway.responses.events import EventRows
from gateway.responses.kept import ResponseOwner
from gateway.secret import Cipher
from tests.gateway.walls.test_tenant_verbs import SECRET
from tests.gateway.walls.two_tenants import id_of


class Stage(Protocol):
    pool: AsyncEngine
    org: str
    conversations: ConversationStore


async def follow_events(stage: Stage) -> object:
    rows = EventRows(
        db=stage.pool,
        system_db=stage.pool,
        conversations=stage.conversations,
        cipher=Cipher(SECRET, "test"),
        lifetime_s=60.0,
    )
    owner = ResponseOwner(stage.org, id_of("projects"))
    return await anext(rows.follow(owner, id_of("responses"), -1, asyncio.Event()))
