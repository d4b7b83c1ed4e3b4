"""`tollgate models evaluate` runs a suite, and records what it said and whether it passed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from gateway.cli.installation.model_evaluations import MAX_EVIDENCE
from gateway.cli.main import tollgate
from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

VERSIONS, EVALUATIONS = "/v1/admin/models/versions", "/v1/admin/models/evaluations"
EVALUATION = {
    "id": "mevl_1",
    "model": "qwen",
    "version": 2,
    "suite": "golden",
    "passed": False,
    "created_at": 1_790_000_000,
}
EVALUATE = ("models", "evaluate", "qwen", "2", "--suite", "golden")


def evaluate(gateway: FakeGateway, *command: str) -> Result:
    target = ("--url", gateway.url, "--key", "sk-test")
    return CliRunner().invoke(tollgate, [*EVALUATE, *target, "--", *command], prog_name="tollgate")


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    version = {"id": "mver_1", "model": "qwen", "version": 2, "served_by": "next"}
    with serving() as found:
        found.on("GET", VERSIONS, {"data": [version], "has_more": False})
        found.on("GET", EVALUATIONS, {"data": [EVALUATION], "has_more": False})
        found.on("POST", EVALUATIONS, EVALUATION)
        yield found


@pytest.mark.parametrize("status", [0, 3])
def test_a_suite_is_run_and_its_verdict_recorded(gateway: FakeGateway, status: int) -> None:
    suite = f"import sys; print('x' * 5000, sys.argv[1]); sys.exit({status})"
    done = evaluate(gateway, sys.executable, "-c", suite, "{model}")
    body = gateway.asked[-1][3]
    assert (body["suite"], body["passed"]) == ("golden", status == 0)
    assert body["evidence"].endswith("x next\n") and len(body["evidence"]) == MAX_EVIDENCE
    assert done.exit_code == (1 if status else 0)
    assert ("did not pass golden" if status else "passed golden") in done.output


def test_a_suite_that_cannot_be_run_says_nothing(gateway: FakeGateway) -> None:
    done = evaluate(gateway, "/nowhere/suite")
    assert done.exit_code == 2 and "/nowhere/suite cannot be run" in done.output
    assert all(method == "GET" for method, *_ in gateway.asked)


def test_evaluations_are_listed(gateway: FakeGateway) -> None:
    lines = gateway.run("models", "evaluations", "qwen").output.splitlines()
    assert lines[1].split()[:4] == ["qwen", "2", "golden", "no"]
