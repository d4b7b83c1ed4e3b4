"""Bodies that no other test reads strictly, as the official SDKs' types have them: models in both
shapes, and refusals of both vendors, on every surface; nothing is missing, nothing is too much."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import ErrorResponse
from openai import OpenAI
from openai.types import ErrorObject

from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.journeys.sdk.sdk_shapes import extras

SURFACES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/embeddings", "/v1/tokenize", "/v1/detokenize", "/v1/conversations", "/v1/batches"),
    *("/v1/messages", "/v1/messages/count_tokens"),
)
VLLMS_OF_A_MODEL = [".root", ".parent", ".max_model_len"]
THINGS = (
    *("/v1/models/nobody", "/v1/files/file-nobody", "/v1/batches/batch_nobody"),
    *("/v1/responses/resp_nobody", "/v1/responses/resp_nobody/input_items"),
    *("/v1/conversations/conv_nobody", "/v1/conversations/conv_nobody/items"),
)


def test_models_in_both_shapes(worker: Running) -> None:
    strict: dict[str, Any] = {
        "api_key": worker.everything,
        "max_retries": 0,
        "_strict_response_validation": True,
    }
    with OpenAI(base_url=f"{worker.url}/v1", **strict) as openai:
        listed = openai.models.list().data
        assert [each.id for each in listed] == ["near", "far"]
        all_of_them = (*listed, openai.models.retrieve("near"))
        assert [extras(each) for each in all_of_them] == [VLLMS_OF_A_MODEL] * 3
    with Anthropic(base_url=worker.url, **strict) as anthropic:
        page = anthropic.models.list()
        assert [each.id for each in page.data] == ["near", "far"]
        assert [extras(each) for each in (page, anthropic.models.retrieve("far"))] == [[]] * 2


def check_refused(worker: Running, method: str, path: str, key: str | None, **options: Any) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    headers |= options.pop("headers", {})
    answer = worker.session.request(
        method, worker.url + path, headers=headers, timeout=TIMEOUT_S, **options
    )
    if path.startswith("/v1/messages") or "anthropic-version" in headers:
        error: Any = ErrorResponse.model_validate(answer.json())
        assert error.model_fields_set == set(ErrorResponse.model_fields) and extras(error) == []
        assert error.request_id == answer.headers["request-id"]
    else:
        assert answer.json().keys() == {"error"}
        error = ErrorObject.model_validate(answer.json()["error"])
        assert error.model_fields_set == {"message", "type", "param", "code"}
        assert extras(error) == []
    return answer.status_code


@pytest.mark.parametrize("path", SURFACES)
def test_refusals_of_what_is_asked(worker: Running, path: str) -> None:
    key = worker.everything
    assert check_refused(worker, "POST", path, None, json={}) == 401
    assert check_refused(worker, "POST", path, worker.nothing, json={}) == 403
    assert check_refused(worker, "POST", path, key, data=b"{") == 400
    assert check_refused(worker, "POST", path, key, json={"model": "near", "nobody": 1}) == 400
    coded = {"content-encoding": "gzip"}
    assert check_refused(worker, "POST", path, key, data=b"{}", headers=coded) == 415
    for other in ("application/x-www-form-urlencoded", "text/plain;charset=UTF-8"):
        typed = {"content-type": other}
        assert check_refused(worker, "POST", path, key, data=b"{}", headers=typed) == 415
    for json_type in ("", "Application/JSON; charset=utf-8", "application/problem+json"):
        typed = {"content-type": json_type}
        assert check_refused(worker, "POST", path, key, data=b"{", headers=typed) == 400
    if path not in ("/v1/conversations", "/v1/batches"):
        assert (
            check_refused(worker, "POST", path, key, json={"model": "nobody", "input": "x"}) == 404
        )
    assert check_refused(worker, "PATCH", path, key, json={}) == 405


@pytest.mark.parametrize("path", THINGS)
def test_refusals_of_what_is_not_there(worker: Running, path: str) -> None:
    assert check_refused(worker, "GET", path, worker.everything) == 404
    assert check_refused(worker, "GET", path, None) == 401


def test_refusals_of_models_in_anthropics_shape(worker: Running) -> None:
    named = {"anthropic-version": "2023-06-01"}
    path = "/v1/models/nobody"
    assert check_refused(worker, "GET", path, worker.everything, headers=named) == 404
    assert check_refused(worker, "GET", path, None, headers=named) == 401


def test_a_body_of_batched_messages_is_json(worker: Running) -> None:
    """It is read as it comes, not as the others are."""
    path, key = "/v1/messages/batches", worker.everything
    for header, value in (("content-type", "text/plain"), ("content-encoding", "gzip")):
        assert check_refused(worker, "POST", path, key, data=b"{}", headers={header: value}) == 415
