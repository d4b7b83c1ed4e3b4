"""Checks errors on Anthropic's paths, as its clients read them: their statuses, their shape, and an
event of its own within a stream."""

from __future__ import annotations

import json

import pytest

from gateway.auth.errors import InvalidKey, MissingScope
from gateway.fleet.errors import DeadlinePassed, ReplicaLost, ReplicaOverloaded
from gateway.http_errors.table import to_http_error
from gateway.inference.generate import RateLimited
from gateway.limits.outcomes import Refusal
from gateway.request_errors import BadField, ContextTooLong, UnknownModel
from gateway.routes.shared.problem import encode_error, encode_error_event, with_vendor_status

PATHS = ("/v1/messages", "/v1/messages/count_tokens")


def limited(kind: str) -> RateLimited:
    return RateLimited(Refusal(scope="org", kind=kind, limit=1, state={}, retry_after_s=1.0))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidKey("x"), 401, "authentication_error"),
        (MissingScope("inference"), 403, "permission_error"),
        (UnknownModel("x"), 404, "not_found_error"),
        (BadField("x", param="tools"), 400, "invalid_request_error"),
        (ContextTooLong("x"), 400, "invalid_request_error"),
        (limited("requests"), 429, "rate_limit_error"),
        (limited("money"), 402, "billing_error"),
        (ReplicaOverloaded("x"), 529, "overloaded_error"),
        (ReplicaLost("x"), 500, "api_error"),
        (DeadlinePassed("x"), 504, "timeout_error"),
    ],
)
def test_an_error_has_the_vendors_status_and_shape(
    path: str, error: Exception, status: int, kind: str
) -> None:
    http_error = with_vendor_status(to_http_error(error), path)
    assert http_error.status == status
    body, media_type = encode_error(http_error, path, "req_1")
    assert media_type == "application/json"
    found = json.loads(body)
    assert found.pop("error").keys() == {"type", "message"}
    assert found == {"type": "error", "request_id": "req_1"}
    assert json.loads(body)["error"]["type"] == kind
    assert encode_error_event(http_error, path, "req_1") == b"event: error\ndata: " + body + b"\n\n"


def test_elsewhere_nothing_is_changed() -> None:
    http_error = to_http_error(ReplicaOverloaded("x"))
    assert (
        with_vendor_status(http_error, "/v1/chat/completions") is http_error
        and http_error.status == 503
    )
