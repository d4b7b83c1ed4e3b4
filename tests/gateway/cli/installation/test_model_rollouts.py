"""`tollgate models rollout` asks the API for rollouts, and changes the one that is under way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

ROLLOUTS = "/v1/admin/models/rollouts"


def rollout(state: str, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "model": "qwen",
        "from_version": 1,
        "to_version": 2,
        "state": state,
        "reason": "",
        "share": 5,
        "steps": [5, 100],
        "watch": 500,
        "new": {"requests": 40},
        "old": {"requests": 800},
        "part_of_proof": 0.25,
        "created_at": 1_790_000_000,
    }


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    rows = [rollout("running", "mrol_2"), rollout("taken_back", "mrol_1")]
    with serving() as found:
        found.on("GET", ROLLOUTS, {"data": rows, "has_more": False, "last_id": "mrol_1"})
        found.on("POST", ROLLOUTS, rows[0])
        for what in ("pause", "resume", "abort", "complete"):
            found.on("POST", f"{ROLLOUTS}/mrol_2/{what}", rows[0])
        yield found


def test_a_rollout_is_started_in_shares(gateway: FakeGateway) -> None:
    begun = gateway.run(
        *("models", "rollout", "start", "qwen", "--to", "2"), *("--share", "5%", "--share", "100")
    )
    assert begun.output.endswith("5% of the organizations get it after 500 of their requests.\n")
    assert gateway.asked[-1][3] == {
        "model": "qwen",
        "version": 2,
        "steps": [5, 100],
        "at_least": 500,
        "watch": 500,
    }
    refused = gateway.run("models", "rollout", "start", "qwen", "--to", "2", "--share", "0%")
    assert refused.exit_code == 2 and "is not a whole percentage" in refused.output


def test_rollouts_are_shown(gateway: FakeGateway) -> None:
    lines = gateway.run("models", "rollout", "status", "qwen").output.splitlines()
    assert lines[1].split()[:7] == ["qwen", "2", "running", "5%", "40", "800", "25%"]
    assert "taken back" in lines[2]


@pytest.mark.parametrize("what", ["pause", "resume", "abort", "complete"])
def test_the_one_that_is_under_way_is_changed(gateway: FakeGateway, what: str) -> None:
    done = gateway.run("models", "rollout", what, "qwen")
    assert done.exit_code == 0 and done.output.startswith("Version 2 of qwen ")
    assert gateway.asked[-1][1] == f"{ROLLOUTS}/mrol_2/{what}"


def test_without_one_under_way_nothing_is_changed(gateway: FakeGateway) -> None:
    ended = {"data": [rollout("completed", "mrol_3")], "has_more": False}
    gateway.on("GET", ROLLOUTS, ended)
    refused = gateway.run("models", "rollout", "abort", "qwen")
    assert refused.exit_code == 2 and "no rollout of qwen is under way" in refused.output
