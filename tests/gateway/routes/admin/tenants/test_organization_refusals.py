"""/v1/organization/...: what is wrong, or cannot be honoured, is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.routes.admin.conftest import World

WRONG: list[Any] = [
    ("/projects", {}, "name"),
    ("/projects", {"name": 1}, "name"),
    ("/projects", {"name": ""}, "name"),
    ("/projects", {"name": "a\x00b"}, "name"),
    ("/projects", {"name": "x", "plan": "gold"}, "plan"),
    ("/projects", {"name": "x", "residency": "GLOBAL"}, "residency"),
    ("/projects", {"name": "x", "geography": "EU"}, "geography"),
    ("/projects", {"name": "x", "external_key_id": "k"}, "external_key_id"),
    ("/projects/{id}", {"name": None}, "name"),
    ("/projects/{id}/archive", {"name": "x"}, "name"),
    ("/projects/{id}/users", {"role": "member"}, "user_id"),
    ("/projects/{id}/users", {"role": "member", "user_id": "u", "email": "e"}, "email"),
    ("/projects/{id}/users", {"role": "member", "email": "e"}, "email"),
    ("/projects/{id}/service_accounts", {"name": "x", "expires_in_seconds": 0}, None),
    (
        "/projects/{id}/service_accounts",
        {"name": "x", "expires_in_seconds": 9, "create_service_account_only": True},
        "expires_in_seconds",
    ),
    ("/projects/{id}/rate_limits/rl-far", {"max_images_per_1_minute": 1}, None),
    ("/projects/{id}/rate_limits/rl-far", {"max_requests_per_1_day": 1}, None),
    ("/projects/{id}/rate_limits/rl-far", {"batch_1_day_max_input_tokens": 1}, None),
    ("/projects/{id}/rate_limits/rl-far", {"max_tokens_per_1_minute": -1}, None),
    ("/projects/{id}/rate_limits/rl-far", {"max_tokens_per_1_minute": None}, None),
    ("/projects/{id}/rate_limits/rl-far", {"max_tokens_per_1_minute": 10**13}, None),
    ("/admin_api_keys", {"name": "x", "scopes": []}, "scopes"),
    ("/invites", {"email": "x@y.example", "role": "developer"}, "role"),
    ("/invites", {"email": "nobody", "role": "reader"}, "email"),
    (
        "/invites",
        {"email": "x@y.example", "role": "reader", "projects": [{"id": "p"}]},
        "projects[0].role",
    ),
]


async def test_what_is_wrong_or_not_honoured_is_refused_by_name(
    world: World, project_id: str, subtests: pytest.Subtests
) -> None:
    for path, body, param in WRONG:
        with subtests.test(path=path, body=body, param=param):
            place = "/v1/organization" + path.format(id=project_id)
            answer = await world.call("POST", place, body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == (param or next(reversed(body)))


BAD_QUERIES: list[Any] = [
    ("limit=0", "limit"),
    ("limit=101", "limit"),
    ("after=", "after"),
    ("after=a&after=b", "after"),
    ("include_archived=maybe", "include_archived"),
    ("order=asc", "order"),
    ("after=%00", "after"),
]


async def test_a_bad_query_is_refused_by_name(world: World, subtests: pytest.Subtests) -> None:
    for query, param in BAD_QUERIES:
        with subtests.test(query=query, param=param):
            answer = await world.call("GET", f"/v1/organization/projects?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


NO_IDS: list[Any] = ["%00", "..%2F", "proj_none", "%F0%9F%92%A9", "x" * 200]


async def test_what_can_be_no_id_is_not_found(world: World, subtests: pytest.Subtests) -> None:
    for bad in NO_IDS:
        with subtests.test(bad=bad):
            for method, path in [
                ("GET", f"/projects/{bad}"),
                ("POST", f"/projects/{bad}/archive"),
                ("GET", f"/projects/{bad}/users"),
                ("GET", f"/projects/{bad}/api_keys"),
                ("GET", f"/projects/{bad}/rate_limits"),
                ("DELETE", f"/users/{bad}"),
                ("GET", f"/invites/{bad}"),
                ("DELETE", f"/admin_api_keys/{bad}"),
            ]:
                answer = await world.call(method, "/v1/organization" + path)
                assert answer.status_code == 404, (method, path, answer.text)
