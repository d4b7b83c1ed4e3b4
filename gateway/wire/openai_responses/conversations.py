"""OpenAI's conversations as structs: what is asked of them, and what they answer.

Pure shapes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.wire.constraints.format_structs import StrictStruct
from gateway.wire.openai.chat import Metadata
from gateway.wire.openai_responses.items import InItem

MAX_ITEMS_AT_A_TIME = 20
"""OpenAI's."""

Some = Annotated[list[InItem], Meta(max_length=MAX_ITEMS_AT_A_TIME)]


class NewConversation(StrictStruct):
    items: Some | None = None
    metadata: Metadata | None = None


class ConversationUpdate(StrictStruct):
    metadata: Metadata | None


class NewItems(StrictStruct):
    items: Annotated[list[InItem], Meta(min_length=1, max_length=MAX_ITEMS_AT_A_TIME)]


class ConversationObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    """Unix seconds."""
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
