"""Commands ask a gateway and show its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

ALERT = {
    "id": "alert_0192aaaa",
    "scope": {"type": "project", "id": "proj_1"},
    "measure": "spend",
    "period": "month",
    "threshold_percent": 80,
    "limit": {"value": "250", "unit": "usd"},
    "used": {"value": "200.000125", "unit": "usd"},
    "reason": "spent",
    "occurred_at": 1795842000,
}
CAP = {
    "id": "cap_1",
    "org_id": "org_1",
    "project_id": None,
    "key_id": None,
    "model": None,
    "tag": None,
    "scope": "org",
    "period": "month",
    "amount_usd": "500",
    "hard": True,
}
INVOICE = {"id": "inv_0192abcdef", "number": "TG-000001"}
CAPS, INVOICES = "/v1/admin/spend-caps", "/v1/admin/invoices"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving() as server:
        yield server


def page(*rows: object, more: bool = False) -> dict[str, object]:
    last = rows[-1]["id"] if rows else None  # type: ignore[index]
    return {"object": "list", "data": list(rows), "has_more": more, "last_id": last}


def test_pages_are_read_until_there_is_no_more(gateway: FakeGateway) -> None:
    second = ALERT | {"id": "alert_0192bbbb"}
    gateway.on("GET", "/v1/admin/alerts", page(ALERT, more=True), page(second))
    done = gateway.run("alerts", "--json")
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [
        "alert_0192aaaa",
        "alert_0192bbbb",
    ]
    queries = [query for _, _, query, _ in gateway.asked]
    assert queries[0] == {"limit": ["100"], "order": ["desc"]}
    assert queries[1] == {"limit": ["99"], "order": ["desc"], "after": ["alert_0192aaaa"]}


def test_what_the_limit_leaves_out_is_said(gateway: FakeGateway) -> None:
    gateway.on("GET", "/v1/admin/alerts", page(ALERT, more=True))
    done = gateway.run("alerts", "--limit", "1")
    assert done.exit_code == 0
    assert done.stderr == "There are more than 1: --limit lists them.\n"
    head, row = done.stdout.splitlines()
    assert head.split() == [
        "WHEN",
        "REACHED",
        "MEASURE",
        "OF",
        "USED",
        "LIMIT",
        "PERIOD",
        "REASON",
        "ID",
    ]
    assert row.split()[2:6] == ["80%", "spend", "proj_1", "200.000125"]


@pytest.mark.parametrize(
    ("status", "body", "code", "line"),
    [
        (400, {"detail": "Too large.", "param": "limit"}, 2, "limit: Too large."),
        (403, {"detail": "Not allowed."}, 2, "Not allowed. (the key for "),
        (500, {"title": "Internal Server Error"}, 1, "Internal Server Error"),
        (200, b"<html>", 1, "the answer is none of Tollgate"),
        (200, [1], 1, "the answer is none of Tollgate"),
        (200, {"data": 1}, 1, "the answer is none of Tollgate"),
    ],
)
def test_whatever_is_answered_is_one_line(
    gateway: FakeGateway, status: int, body: object, code: int, line: str
) -> None:
    gateway.on("GET", "/v1/admin/alerts", body, status=status)
    done = gateway.run("alerts")
    assert (done.exit_code, done.stdout) == (code, "")
    assert line in done.stderr and done.stderr.count("\n") == 1
    assert "sk-test" not in done.stderr


def test_a_budget_that_is_there_gets_another_amount(gateway: FakeGateway) -> None:
    gateway.on("GET", CAPS, page(CAP))
    gateway.on("PATCH", f"{CAPS}/cap_1", CAP | {"amount_usd": "600"})
    done = gateway.run("budgets", "set", "600")
    said = "cap_1: 600.00 USD per month of the key's organization; it refuses what is beyond.\n"
    assert done.stdout == said
    assert gateway.asked[-1][3] == {"amount_usd": "600", "hard": True}


def test_a_new_budget_names_its_scope(gateway: FakeGateway) -> None:
    gateway.on("GET", CAPS, page(CAP))
    gateway.on("POST", CAPS, CAP | {"id": "cap_2", "hard": False, "period": "day"})
    done = gateway.run("budgets", "set", "20", "--per", "day", "--project", "proj_1", "--soft")
    assert done.exit_code == 0, done.output
    assert gateway.asked[-1] == (
        "POST",
        CAPS,
        {},
        {"amount_usd": "20", "hard": False, "period": "day", "project_id": "proj_1"},
    )


def test_an_organization_may_be_named(gateway: FakeGateway) -> None:
    orgs = page({"id": "org_7", "name": "acme"}, {"id": "org_8", "name": "other"})
    gateway.on("GET", "/v1/admin/orgs", orgs)
    gateway.on("POST", "/v1/admin/credits", {"id": "credit_1", "amount_usd": "12.5"})
    done = gateway.run("credits", "add", "acme", "12.5", "--expires", "2027-01-01")
    assert done.stdout == "credit_1: acme is credited with 12.50 USD.\n"
    assert gateway.asked[-1][3] == {
        "org_id": "org_7",
        "amount_usd": "12.5",
        "expires_at": 1798761600,
    }
    gateway.on("GET", "/v1/admin/orgs", orgs)
    assert gateway.run("credits", "add", "nobody", "1").stderr == (
        "tollgate: org: no organization 'nobody'\n"
    )


def test_a_project_may_be_named(gateway: FakeGateway) -> None:
    projects = page({"id": "proj_7", "name": "web"}, {"id": "proj_8", "name": "other"})
    gateway.on("GET", "/v1/admin/projects", projects)
    gateway.on("GET", "/v1/organization/usage/completions", {"data": [], "has_more": False})
    done = gateway.run("usage", "--project", "web", "--project", "proj_9")
    assert done.exit_code == 0, done.output
    assert gateway.asked[-1][2]["project_ids"] == ["proj_7", "proj_9"]
    done = gateway.run("budgets", "set", "20", "--project", "none")
    assert done.exit_code == 2
    assert done.stderr.startswith(
        "tollgate: project: the organization has no project 'none'; --org"
    )


def test_an_operator_sees_the_usage_of_another_organization_by_names(
    gateway: FakeGateway,
) -> None:
    gateway.on("GET", "/v1/admin/orgs", page({"id": "org_7", "name": "acme"}))
    gateway.on("GET", "/v1/admin/projects", page({"id": "proj_7", "name": "web"}))
    used = {"num_model_requests": 1, "input_tokens": 2, "input_cached_tokens": 0}
    used |= {"output_tokens": 3}
    results = [{"project_id": each, **used} for each in ("proj_7", "proj_8")]
    bucket = {"start_time": 0, "results": results}
    gateway.on("GET", "/v1/organization/usage/completions", {"data": [bucket]})
    done = gateway.run("usage", "today", "--by", "project", "--org", "acme")
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["PROJECT", "PROJECT", "ID"]
    assert [row.split()[:2] for row in rows] == [["web", "proj_7"], ["proj_8", "proj_8"]]
    asked = {path: query for _, path, query, _ in gateway.asked}
    assert asked["/v1/organization/usage/completions"]["org_id"] == ["org_7"]
    assert asked["/v1/admin/projects"]["org_id"] == ["org_7"]


def test_ids_stand_for_names_that_a_key_may_not_list(gateway: FakeGateway) -> None:
    amount = {"value": "1.5", "currency": "usd"}
    bucket = {"start_time": 0, "results": [{"api_key_id": "key_7", "amount": amount}]}
    gateway.on("GET", "/v1/organization/costs", {"data": [bucket]})
    gateway.on("GET", "/v1/admin/keys", {"title": "No."}, status=403)
    done = gateway.run("costs", "today", "--by", "key", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "api_key_id": "key_7",
        "amount_usd": 1.5,
        "api_key_name": "key_7",
    }


@pytest.mark.parametrize("named", ["TG-000001", "inv_0192abcdef", "…abcdef", "abcdef"])
def test_an_invoice_is_written_by_number_id_or_ending(
    gateway: FakeGateway, tmp_path: Path, named: str
) -> None:
    gateway.on("GET", INVOICES, page(INVOICE, {"id": "inv_0192fedcba", "number": None}))
    gateway.on("GET", f"{INVOICES}/inv_0192abcdef/export", b"%PDF-1.7")
    path = tmp_path / "it.pdf"
    done = gateway.run("invoices", "get", named, "-o", str(path))
    assert done.stdout == f"{path}: 8 bytes\n"
    assert path.read_bytes() == b"%PDF-1.7"
    assert gateway.asked[-1][2] == {"format": ["pdf"]}


@pytest.mark.parametrize(
    ("named", "problem"), [("2026-9", "there is none"), ("0192", "there is none")]
)
def test_no_invoice_is_guessed(gateway: FakeGateway, named: str, problem: str) -> None:
    gateway.on("GET", INVOICES, page(INVOICE))
    done = gateway.run("invoices", "get", named)
    assert done.exit_code == 2 and problem in done.stderr


def test_usage_is_summed_over_buckets_and_pages(gateway: FakeGateway) -> None:
    path = "/v1/organization/usage/completions"
    result = {
        "model": "penny",
        "num_model_requests": 1,
        "input_tokens": 10,
        "input_cached_tokens": 4,
        "output_tokens": 3,
    }

    def bucket(start: int, *results: object) -> dict[str, object]:
        return {"start_time": start, "end_time": start + 86400, "results": list(results)}

    first = {"data": [bucket(0, result)], "has_more": True, "next_page": "page_86400"}
    last = {"data": [bucket(86400, result), bucket(172800)], "has_more": False, "next_page": None}
    gateway.on("GET", path, first, last)
    done = gateway.run("usage", "2026-11", "--json")
    assert json.loads(done.stdout) == {
        "model": "penny",
        "num_model_requests": 2,
        "input_tokens": 20,
        "input_cached_tokens": 8,
        "output_tokens": 6,
    }
    assert [query.get("page") for _, _, query, _ in gateway.asked] == [None, ["page_86400"]]
    assert gateway.asked[0][2]["bucket_width"] == ["1d"]
    gateway.on("GET", path, first, last)
    by_day = gateway.run("usage", "2026-11", "--per", "day", "--csv").stdout.splitlines()
    assert by_day[1:] == [
        "1970-01-01T00:00:00+00:00,penny,1,10,4,3",
        "1970-01-02T00:00:00+00:00,penny,1,10,4,3",
    ]


def test_costs_are_exact_to_the_last_digit(gateway: FakeGateway) -> None:
    amounts = b"0.000000000001", b"12345678901234.000000000001"
    results = b", ".join(
        b'{"line_item": "penny", "amount": {"value": %b, "currency": "usd"}}' % each
        for each in amounts
    )
    page = b'{"data": [{"start_time": 0, "end_time": 1, "results": [%b]}], "has_more": false}'
    gateway.on("GET", "/v1/organization/costs", page % results)
    done = gateway.run("costs", "2026-11", "--json")
    assert done.stdout == '{"line_item":"penny","amount_usd":12345678901234.000000000002}\n'


def test_an_unknown_group_and_period_are_named(gateway: FakeGateway) -> None:
    assert "'x' is none of model, project" in gateway.run("usage", "--by", "x").stderr
    assert "'soon' is no period; try today" in gateway.run("usage", "soon").stderr
    assert gateway.asked == []
