"""Conversations, responses that are kept, Anthropic's models and what counts a message's tokens,
for `surfaces`; and which headers a request may have.
"""

from __future__ import annotations

import msgspec

from gateway.wire.anthropic.models import ModelsQuery
from gateway.wire.fields.surface import SurfaceFields
from gateway.wire.openai_responses import request as responses
from gateway.wire.openai_responses.conversations import (
    ConversationUpdate,
    NewConversation,
    NewItems,
)
from gateway.wire.openai_responses.queries import IncludeQuery, ItemsQuery, RetrieveQuery

ITEM_IGNORED = {
    "content[].annotations": "of an earlier answer",
    "content[].logprobs": "of an earlier answer",
    "content[].parsed": "what a client's library read in the text",
}
ITEM_NOT_YET = {
    path.replace("input[]", "items[]"): values
    for path, values in responses.NOT_YET.items()
    if path.startswith("input[]")
}
INCLUDED = "taken; what could be included is in it, where it was asked for when it was made"
RESPONSE = SurfaceFields(
    title="GET /v1/responses/{id} (query)",
    body=RetrieveQuery,
    ignored={"include": INCLUDED},
    notes={
        "stream": "of one that runs in the background: its events",
        "starting_after": "with `stream`: the number of the event behind which it goes on",
        "include_obfuscation": "true is refused: events are not padded",
    },
    refused_values={},
)
INPUT_ITEMS = SurfaceFields(
    title="GET /v1/responses/{id}/input_items (query)",
    body=ItemsQuery,
    ignored={"include": INCLUDED},
    notes={"order": "the newest come first unless it is said"},
    refused_values={},
)
NEW_CONVERSATION = SurfaceFields(
    title="POST /v1/conversations",
    body=NewConversation,
    ignored={f"items[].{path}": why for path, why in ITEM_IGNORED.items()},
    notes={"items": "as `input` of `POST /v1/responses`"},
    refused_values=ITEM_NOT_YET,
)
CONVERSATION = SurfaceFields(
    title="POST /v1/conversations/{id}",
    body=ConversationUpdate,
    ignored={},
    notes={"metadata": "in place of what was there"},
    refused_values={},
)
NEW_ITEMS = SurfaceFields(
    title="POST /v1/conversations/{id}/items",
    body=NewItems,
    ignored=NEW_CONVERSATION.ignored,
    notes=NEW_CONVERSATION.notes,
    refused_values=ITEM_NOT_YET,
)
ITEMS = SurfaceFields(
    title="GET /v1/conversations/{id}/items (query)",
    body=ItemsQuery,
    ignored=INPUT_ITEMS.ignored,
    notes=INPUT_ITEMS.notes,
    refused_values={},
)
ITEM = SurfaceFields(
    title="POST /v1/conversations/{id}/items (query),"
    " GET /v1/conversations/{id}/items/{id} (query)",
    body=IncludeQuery,
    ignored=INPUT_ITEMS.ignored,
    notes={},
    refused_values={},
)
MODELS = SurfaceFields(
    title="GET /v1/models (query) of who sends `anthropic-version`",
    body=ModelsQuery,
    ignored={"beta": "an SDK's name for the same models"},
    notes={
        "after_id": "those behind it",
        "before_id": "those before it, the nearest of them",
    },
    refused_values={},
)
KEPT_SURFACES = (RESPONSE, INPUT_ITEMS, NEW_CONVERSATION, CONVERSATION, NEW_ITEMS, ITEMS, ITEM)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    on: tuple[str, ...]
    """`METHOD path`, or a prefix of it with `*`."""
    meaning: str


GENERATION = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/messages",
    "POST /v1/responses",
)
BATCHES = ("POST /v1/batches", "POST /v1/messages/batches")
REQUEST_HEADERS = (
    Header(
        name="Idempotency-Key",
        on=(*GENERATION, *BATCHES, "POST /v1/conversations", "POST /v1/files"),
        meaning="up to 255 characters; repeated with it within 24 hours by the same credential (an"
        " API key, or an OAuth client for the same person: another key of the same project is"
        " another), the request is done and billed once and answered as before; 409 while the first"
        " runs, 400 with another body. Every POST below `/v1/admin` takes it, too",
    ),
    Header(
        name="X-Request-Timeout-Ms",
        on=GENERATION,
        meaning="how long the answer may take: what cannot begin by then is a 503, what is not"
        " complete by then is cut off and billed for what was generated",
    ),
    Header(
        name="X-Tollgate-Cost",
        on=GENERATION,
        meaning="`true`, `1`, `false` or `0`: whether the answer says what it cost",
    ),
    Header(
        name="X-Tollgate-Tags",
        on=(*GENERATION, *BATCHES),
        meaning="what usage is counted by, as `team=search,feature=chat`",
    ),
    Header(
        name="anthropic-version",
        on=("* /v1/messages*", "GET /v1/models*"),
        meaning="from 2023-06-01 on; on `/v1/models` it asks for the list in Anthropic's shape",
    ),
)
