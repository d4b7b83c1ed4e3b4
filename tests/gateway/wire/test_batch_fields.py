"""The official SDKs can send what docs/fields.md says of files and batches, and the structs do
it."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import anthropic.types.messages as anthropic_types
import msgspec
import pytest
from anthropic.types.messages import batch_create_params as message_batch_params
from openai.types import (
    batch_create_params,
    batch_list_params,
    file_create_params,
    file_list_params,
)

from gateway.request_errors import BadField
from gateway.routes.openai.batches import ENDPOINTS
from gateway.wire.fields.surfaces import (
    BATCH_LIST,
    BATCH_SURFACES,
    BATCHES,
    FILE_LIST,
    FILES,
    MESSAGE_BATCH_LIST,
    MESSAGE_BATCHES,
    SurfaceFields,
)
from gateway.wire.fields.table import rows
from gateway.wire.openai.files import ANCHOR, SECONDS, read_upload
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import decode

HEADERS = {"user_profile_id", "workspace_id"}
"""Parameters that Anthropic's SDK sends as headers, in neither body nor query."""
THEIRS: list[tuple[SurfaceFields, str, Any]] = [
    (FILES, "", file_create_params.FileCreateParams),
    (FILE_LIST, "", file_list_params.FileListParams),
    (BATCHES, "", batch_create_params.BatchCreateParams),
    (BATCHES, "output_expires_after.", batch_create_params.OutputExpiresAfter),
    (BATCH_LIST, "", batch_list_params.BatchListParams),
    (MESSAGE_BATCHES, "", anthropic_types.BatchCreateParams),
    (MESSAGE_BATCHES, "requests[].", message_batch_params.Request),
    (MESSAGE_BATCH_LIST, "", anthropic_types.BatchListParams),
]


def paths(surface: SurfaceFields) -> set[str]:
    return {row.path for row in rows(surface)}


@pytest.mark.parametrize(("surface", "prefix", "params"), THEIRS)
def test_every_field_of_the_sdks_is_in_the_table(
    surface: SurfaceFields, prefix: str, params: Any
) -> None:
    named = {f"{prefix}{name}" for name in params.__annotations__.keys() - HEADERS}
    if surface is FILES:
        named = named - {"expires_after"} | {ANCHOR, SECONDS}
    assert named and named <= paths(surface)


def literals(params: Any, name: str) -> set[str]:
    kind = get_type_hints(params)[name]
    while get_origin(kind) is not Literal:
        (kind,) = get_args(kind)
    return set(get_args(kind))


def test_every_value_of_the_sdks_is_taken_or_refused_by_name() -> None:
    refused = BATCHES.refused_values["endpoint"]
    assert {*ENDPOINTS} | refused == literals(batch_create_params.BatchCreateParams, "endpoint")
    assert refused.isdisjoint(ENDPOINTS)
    for purpose in literals(file_create_params.FileCreateParams, "purpose"):
        fields = {"purpose": purpose}
        if purpose not in FILES.refused_values["purpose"]:
            assert read_upload(fields, "x").purpose == purpose
            continue
        with pytest.raises(BadField) as caught:
            read_upload(fields, "x")
        assert caught.value.param == "purpose"


@pytest.mark.parametrize("surface", BATCH_SURFACES, ids=lambda each: each.title)
def test_what_is_not_in_the_table_is_refused_by_its_name(surface: SurfaceFields) -> None:
    """In a form, a query or a body; what is there is honoured, or said to be ignored."""
    treatments = {row.path: row.treatment for row in rows(surface)}
    assert {path for path, said in treatments.items() if said != "honoured"} == {*surface.ignored}
    with pytest.raises(BadField) as caught:
        if surface is FILES:
            read_upload({"purpose": "batch", "unknown": "x"}, "x")
        elif "(query)" in surface.title:
            parse_query("unknown=x", surface.body)
        else:
            decode(msgspec.json.Decoder(surface.body), b'{"unknown":1}')
    assert caught.value.param == "unknown"
