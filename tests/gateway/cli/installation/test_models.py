"""`tollgate models add`, `set` and `remove` change what is stored of a model, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli.installation.models import changed
from gateway.cli.main import tollgate
from gateway.cli.shared.stored import value_of
from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

STORED = "/v1/admin/settings/models"
UPSTREAM = "https://h.example/v1"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving() as found:
        homes = [{"home": "host:/home", "in_force": True, "problem": None}]
        one = {"content": {"upstream": UPSTREAM, "context_window": 5}, "changes": ["~ x"]}
        found.on("POST", STORED, one, status=201)
        for method in ("GET", "PUT", "DELETE"):
            found.on(method, f"{STORED}/a/b", one)
        found.on("GET", "/v1/admin/settings", {"number": 1, "homes": homes})
        yield found


def run(gateway: FakeGateway, *arguments: str, stdin: str = "") -> Result:
    target = ("--url", gateway.url, "--key", "sk-test")
    return CliRunner().invoke(tollgate, ["models", *arguments, *target], input=stdin)


def test_a_model_is_added_with_its_key(gateway: FakeGateway) -> None:
    done = run(
        gateway,
        "add",
        "a/b",
        "--upstream",
        UPSTREAM,
        "max_concurrency=8",
        "--key-stdin",
        stdin="sk-canary\n",
    )
    assert done.exit_code == 0, done.output
    assert done.output == "~ x\na/b is added and served.\n"
    body = gateway.asked[0][3]
    assert body == {
        "name": "a/b",
        "content": {"upstream": UPSTREAM, "max_concurrency": 8},
        "api_key": "sk-canary",
    }


def test_a_taken_name_says_how_its_model_is_changed(gateway: FakeGateway) -> None:
    told = {"code": "name_taken", "param": "name", "detail": "another one has this already"}
    gateway.on("POST", STORED, told, status=409)
    done = run(gateway, "add", "a/b", "--upstream", UPSTREAM)
    assert done.exit_code == 2
    assert "there is a model 'a/b' already; `tollgate models set` changes it" in done.output


def test_a_field_is_changed_or_taken_away(gateway: FakeGateway) -> None:
    done = run(gateway, "set", "a/b", "context_window=", "upstream_model=big")
    assert done.exit_code == 0, done.output
    (body,) = [each[3] for each in gateway.asked if each[0] == "PUT"]
    assert body == {"content": {"upstream": UPSTREAM, "upstream_model": "big"}}
    assert run(gateway, "set", "a/b", "--no-key").exit_code == 0
    body = [each[3] for each in gateway.asked if each[0] == "PUT"][-1]
    assert body["api_key"] is None


def test_a_dry_run_stores_nothing(gateway: FakeGateway) -> None:
    for arguments in (
        ("add", "a/b", "--upstream", UPSTREAM),
        ("set", "a/b", "context_window=7"),
        ("remove", "a/b"),
    ):
        done = run(gateway, *arguments, "--dry-run")
        assert done.exit_code == 0 and done.output == "~ x\nNothing is stored.\n", done.output
    asked = [query for method, _, query, _ in gateway.asked if method != "GET"]
    assert asked == [{"dry_run": ["true"]}] * 3


def test_what_is_not_there_and_what_is_no_key_is_said(gateway: FakeGateway) -> None:
    for arguments, stdin in (
        (("set", "nobody", "x=1"), ""),
        (("set", "a/b"), ""),
        (("set", "a/b", "context_window"), ""),
        (("add", "a/b", "--key-stdin"), "two\nlines"),
        (("add", "a/b", "--key-stdin"), ""),
    ):
        assert run(gateway, *arguments, stdin=stdin).exit_code == 2
    assert all(method == "GET" for method, *_ in gateway.asked)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("true", True),
        ("big", "big"),
        ('"8"', "8"),
        ("a\nb = 1", "a\nb = 1"),
        ("1\nb=2", "1\nb=2"),
    ],
)
def test_a_value_is_that_of_toml_or_a_word(text: str, value: Any) -> None:
    assert value_of(text) == value
    assert changed({}, None, [f"x={text}"]) == {"x": value}
