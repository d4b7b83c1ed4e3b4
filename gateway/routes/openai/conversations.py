"""/v1/conversations: items that responses are added to by themselves."""

from __future__ import annotations

from typing import Any

from litestar import Response
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.principal import SCOPE_INFERENCE
from gateway.responses.conversations import ConversationStore
from gateway.responses.creation import NOTHING_KEPT
from gateway.responses.kept import ResponseOwner, to_json
from gateway.routes.openai.responses import ItemList, to_list
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.idempotency import create_once
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import RouteGroup
from gateway.wire.openai_responses.context import to_items
from gateway.wire.openai_responses.conversations import (
    ConversationObject,
    ConversationUpdate,
    DeletedConversation,
    NewConversation,
    NewItems,
)
from gateway.wire.openai_responses.from_responses import new_id, read_items
from gateway.wire.openai_responses.items import Item
from gateway.wire.openai_responses.queries import IncludeQuery, ItemsQuery
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import unsupported

CONVERSATIONS = "/v1/conversations"
CONVERSATION = CONVERSATIONS + "/{conversation_id:str}"
ITEMS = CONVERSATION + "/items"
ITEM = ITEMS + "/{item_id:str}"
conversations = RouteGroup(tag="Conversations", opt=needs(SCOPE_INFERENCE))


def store_of(request: AuthenticatedRequest) -> tuple[ConversationStore, ResponseOwner]:
    return services(request).responses.conversations, ResponseOwner.of(request.user)


def show(answer: Any) -> Response[bytes]:
    return Response(to_json(answer), media_type=JSON)


@conversations.post(
    CONVERSATIONS,
    "Create a conversation",
    body=NewConversation,
    answer=ConversationObject,
    idempotent=True,
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    if request.user.keeps_nothing:
        raise unsupported("conversation", NOTHING_KEPT)
    body = await plain_body(request)
    wanted = read_items(body, "items", NewConversation)
    store, owner = store_of(request)
    items = to_items(wanted.items, new_id, {}, param="items")

    async def make(conn: AsyncConnection) -> ConversationObject:
        return await store.create(conn, owner, wanted.metadata or {}, items)

    return (await create_once(request, body, make)).response


@conversations.get(CONVERSATION, "One conversation, without its items", answer=ConversationObject)
async def retrieve(
    request: AuthenticatedRequest, conversation_id: FromPath[str]
) -> Response[bytes]:
    store, owner = store_of(request)
    return show(await store.find(owner, conversation_id))


@conversations.post(
    CONVERSATION,
    "Replace the metadata of a conversation",
    body=ConversationUpdate,
    answer=ConversationObject,
)
async def update(request: AuthenticatedRequest, conversation_id: FromPath[str]) -> Response[bytes]:
    wanted = read_items(await plain_body(request), "items", ConversationUpdate)
    store, owner = store_of(request)
    return show(await store.update(owner, conversation_id, wanted.metadata or {}))


@conversations.delete(
    CONVERSATION,
    "Forget a conversation and its items; responses that are kept stay",
    answer=DeletedConversation,
)
async def forget(request: AuthenticatedRequest, conversation_id: FromPath[str]) -> Response[bytes]:
    store, owner = store_of(request)
    await store.delete(owner, conversation_id)
    return show(DeletedConversation(id=conversation_id))


@conversations.post(
    ITEMS, "Add items to a conversation", query=IncludeQuery, body=NewItems, answer=ItemList
)
async def add_items(
    request: AuthenticatedRequest, conversation_id: FromPath[str]
) -> Response[bytes]:
    parse_query(request.url.query, IncludeQuery)
    wanted = read_items(await plain_body(request), "items", NewItems)
    store, owner = store_of(request)
    items = to_items(wanted.items, new_id, {}, param="items")
    await store.add_items(owner, conversation_id, items)
    return show(to_list(list(items), more=False))


@conversations.get(ITEMS, "The items of a conversation", query=ItemsQuery, answer=ItemList)
async def list_items(
    request: AuthenticatedRequest, conversation_id: FromPath[str]
) -> Response[bytes]:
    query = parse_query(request.url.query, ItemsQuery)
    store, owner = store_of(request)
    data, more = await store.page(
        owner, conversation_id, after=query.after, limit=query.limit, order=query.order
    )
    return show(to_list(data, more=more))


@conversations.get(ITEM, "One item of a conversation", query=IncludeQuery, answer=Item)
async def retrieve_item(
    request: AuthenticatedRequest, conversation_id: FromPath[str], item_id: FromPath[str]
) -> Response[bytes]:
    parse_query(request.url.query, IncludeQuery)
    store, owner = store_of(request)
    return show(await store.item(owner, conversation_id, item_id))


@conversations.delete(ITEM, "Forget one item of a conversation", answer=ConversationObject)
async def forget_item(
    request: AuthenticatedRequest, conversation_id: FromPath[str], item_id: FromPath[str]
) -> Response[bytes]:
    store, owner = store_of(request)
    return show(await store.delete_item(owner, conversation_id, item_id))


routes = [
    create,
    retrieve,
    update,
    forget,
    add_items,
    list_items,
    retrieve_item,
    forget_item,
]
