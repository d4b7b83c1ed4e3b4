"""RFC 8707: which resources are ours."""

from __future__ import annotations

import pytest

from gateway.auth.resources import (
    MAX_RESOURCE_LENGTH,
    MAX_RESOURCES,
    InvalidTarget,
    find_resource,
    find_resources,
)

URL = "https://tollgate.example"
ORG = "org_" + "0" * 32
OTHER = "org_" + "1" * 32


def test_ours_are_the_issuer_its_api_and_one_for_each_org() -> None:
    for value, uri, org in (
        (URL, URL, None),
        (URL + "/", URL, None),
        (URL + "/v1", URL + "/v1", None),
        (URL + "/v1/", URL + "/v1", None),
        (f"{URL}/mcp/{ORG}", f"{URL}/mcp/{ORG}", ORG),
        (f"{URL}/mcp/{ORG}/", f"{URL}/mcp/{ORG}", ORG),
    ):
        found = find_resource(value, URL)
        assert (found.uri, found.org_id) == (uri, org)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "/v1",
        "mcp",
        "https://other.example/v1",
        "https://tollgate.example.evil.example/v1",
        "https://tollgate.example@evil.example/v1",
        "http://tollgate.example/v1",
        "https://TOLLGATE.example/v1",
        URL + "/v1#",
        URL + "/v1#fragment",
        URL + "/v1?x=1",
        URL + "//v1",
        URL + "/v1//",
        URL + "/v2",
        URL + "/mcp",
        URL + "/mcp/org_1",
        URL + f"/mcp/{ORG}/tools",
        URL + "/mcp/" + ORG.upper(),
        URL + "/v1\n",
        "https://tollgate.ex\u0430mple/v1",
        URL + "/" * MAX_RESOURCE_LENGTH,
    ],
)
def test_nothing_else_is(value: str) -> None:
    with pytest.raises(InvalidTarget):
        find_resource(value, URL)


def test_several_are_kept_once_each_of_one_org() -> None:
    found = find_resources([URL + "/v1/", f"{URL}/mcp/{ORG}", URL + "/v1"], URL)
    assert [each.uri for each in found] == [f"{URL}/mcp/{ORG}", URL + "/v1"]
    assert find_resources([], URL) == []
    with pytest.raises(InvalidTarget, match="two organizations"):
        find_resources([f"{URL}/mcp/{ORG}", f"{URL}/mcp/{OTHER}"], URL)
    with pytest.raises(InvalidTarget, match="too many"):
        find_resources([URL] * (MAX_RESOURCES + 1), URL)
