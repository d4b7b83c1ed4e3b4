"""An operator at the command line: what was called is found again by each command."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.stack import Stack


def rows(stack: Stack, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stack.run(*arguments, "--json").splitlines()]


def test_what_was_called_is_counted_costs_and_is_seen_to_run(stack: Stack) -> None:
    key = json.loads(stack.run("keys", "create", "--json", "--name", "commands"))
    client = stack.client(api_key=key["key"])
    answer = client.chat.completions.create(
        model="penny", messages=[{"role": "user", "content": "Hello!"}], max_tokens=8
    )
    assert answer.usage is not None
    stack.wait_booked()
    (used,) = [
        row
        for row in rows(stack, "usage", "last 2h", "--by", "key", "--by", "model")
        if row["api_key_id"] == key["id"]
    ]
    assert (used["model"], used["num_model_requests"]) == ("penny", 1)
    assert used["input_tokens"] == answer.usage.prompt_tokens
    assert used["output_tokens"] == answer.usage.completion_tokens
    (cost,) = [row for row in rows(stack, "costs", "--by", "key") if row["api_key_id"] == key["id"]]
    assert cost["amount_usd"] > 0
    (seen,) = [row for row in rows(stack, "top", "--once") if row["model"] == "penny"]
    assert seen["requests_s"] >= 0 and seen["kv_used"] is not None
    (served,) = rows(stack, "models", "list")
    assert served["id"] == "penny" and served["available"]
    assert rows(stack, "status")[0]["status"] in ("ready", "degraded")


def test_an_operator_asks_for_what_another_organization_used_and_others_may_not(
    stack: Stack,
) -> None:
    org = json.loads(stack.run("orgs", "create", "--name", "seen", "--json"))
    key = json.loads(stack.run("keys", "create", "--json", "--name", "shop", "--org", "seen"))
    made = ("keys", "create", "--json", "--name", "admin", "--org", "seen")
    theirs = json.loads(stack.run(*made, "--scope", "admin:*", "--scope", "usage:read"))["key"]
    with stack.client(api_key=key["key"]) as client:
        client.chat.completions.create(
            model="penny", messages=[{"role": "user", "content": "Hello!"}], max_tokens=8
        )
    stack.wait_booked()
    (used,) = rows(stack, "usage", "today", "--by", "key", "--org", "seen")
    assert (used["api_key_name"], used["num_model_requests"]) == ("shop", 1)
    (cost,) = rows(stack, "costs", "--by", "project", "--org", "seen")
    assert cost["project_name"] == "default" and cost["amount_usd"] > 0
    for path in ("usage/completions", "costs"):
        refused = httpx.get(
            f"{stack.base_url}/v1/organization/{path}",
            params={"start_time": 0, "org_id": org["id"]},
            headers={"authorization": f"Bearer {theirs}"},
            timeout=60,
        )
        assert refused.status_code == 403 and "operator" in refused.text


def test_a_budget_is_set_changed_seen_and_lifted(stack: Stack) -> None:
    made = stack.run("budgets", "set", "900", "--per", "total")
    cap_id = made.partition(":")[0]
    assert stack.run("budgets", "set", "901", "--per", "total").startswith(f"{cap_id}: 901.00 USD")
    (cap,) = [row for row in rows(stack, "budgets", "list") if row["id"] == cap_id]
    assert (cap["amount_usd"], cap["hard"]) == ("901", True)
    assert stack.run("budgets", "remove", cap_id[-8:]) == f"{cap_id} is lifted.\n"
    assert cap_id not in stack.run("budgets", "list")
