"""docs/fields.md has every body, query and header that a route of the vendors' surfaces says it
takes, and every field that the official SDKs send there."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import anthropic.types as anthropic_types
import pytest
from anthropic.types import message_count_tokens_params
from litestar.handlers import HTTPRouteHandler
from openai.types import conversations as conversation_types
from openai.types.responses import (
    input_item_list_params,
    input_token_count_params,
    response_compact_params,
    response_retrieve_params,
)

from gateway.routes.anthropic import message_batches, messages
from gateway.routes.openai import (
    batches,
    conversations,
    files,
    inference,
    models,
    responses,
    tokenize,
)
from gateway.wire.fields import surfaces as kept
from gateway.wire.fields.surfaces import COUNT_TOKENS, RESPONSES, SURFACES, SurfaceFields
from gateway.wire.fields.table import rows

MODULES = (
    *(inference, responses, conversations, tokenize),
    *(messages, message_batches, models, files, batches),
)
THEIRS: list[tuple[SurfaceFields, Any, set[str]]] = [
    (kept.RESPONSE, response_retrieve_params.ResponseRetrieveParamsBase, set()),
    (kept.INPUT_ITEMS, input_item_list_params.InputItemListParams, set()),
    (kept.NEW_CONVERSATION, conversation_types.ConversationCreateParams, set()),
    (kept.CONVERSATION, conversation_types.ConversationUpdateParams, set()),
    (kept.NEW_ITEMS, conversation_types.ItemCreateParams, {"include"}),
    (kept.ITEMS, conversation_types.ItemListParams, set()),
    (kept.ITEM, conversation_types.ItemRetrieveParams, {"conversation_id"}),
    (kept.MODELS, anthropic_types.ModelListParams, {"betas", "workspace_id", "lifecycle"}),
    (COUNT_TOKENS, message_count_tokens_params.MessageCountTokensParams, {"workspace_id"}),
    (kept.COMPACT, response_compact_params.ResponseCompactParams, set()),
    (RESPONSES, input_token_count_params.InputTokenCountParams, {"personality"}),
]
"""And what of it stands in a path, in a query or in a header, or is refused as unknown:
`lifecycle`, `personality`."""


def taken() -> Iterator[tuple[str, list[str], set[str], set[str]]]:
    """Return what each route takes: `METHOD path`, its body's structs, its query, its headers."""
    for module in MODULES:
        for route in module.routes:
            assert isinstance(route, HTTPRouteHandler)
            operation = route.operation_class()
            [method] = route.http_methods
            bodies = re.findall(r"#/components/schemas/(\w+)", repr(operation.request_body))
            found: dict[str, set[str]] = {"query": set(), "header": set()}
            for each in operation.parameters or ():
                found[each.param_in].add(each.name)
            for path in sorted(route.paths):
                name = f"{method} {re.sub(r'{[^}]*}', '{id}', path)}"
                yield name, bodies, found["query"], found["header"]


TAKEN = list(taken())


def tables(name: str, *, of_query: bool) -> list[SurfaceFields]:
    mark = r" \(query\)" if of_query else r"(?! \(query\))"
    title = re.compile(rf"(?:^|, |and ){re.escape(name)}{mark}(?![\w/{{])")
    return [surface for surface in SURFACES if title.search(surface.title)]


@pytest.mark.parametrize(("name", "bodies"), [(name, each) for name, each, _, _ in TAKEN if each])
def test_every_body_has_its_table(name: str, bodies: list[str]) -> None:
    assert set(bodies) <= {surface.body.__name__ for surface in tables(name, of_query=False)}


@pytest.mark.parametrize(("name", "query"), [(name, query) for name, _, query, _ in TAKEN if query])
def test_every_query_has_its_table(name: str, query: set[str]) -> None:
    [surface] = tables(name, of_query=True)
    assert {row.path.partition(".")[0] for row in rows(surface)} == query


def test_every_header_is_told_with_its_routes() -> None:
    known = {header.name: header.on for header in kept.REQUEST_HEADERS}
    for name, _, _, headers in TAKEN:
        told = {
            header
            for header, on in known.items()
            if any(fnmatch.fnmatchcase(name, each) for each in on)
        }
        assert told == headers, name
    names = [name for name, *_ in TAKEN]
    for on in known.values():
        assert [each for each in on if not fnmatch.filter(names, each)] == []


@pytest.mark.parametrize(
    ("surface", "theirs", "elsewhere"), THEIRS, ids=[each[0].title for each in THEIRS]
)
def test_every_field_of_the_sdk_is_told(
    surface: SurfaceFields, theirs: Any, elsewhere: set[str]
) -> None:
    told = {row.path.partition(".")[0] for row in rows(surface)}
    assert set(get_type_hints(theirs)) - elsewhere - told == set()
