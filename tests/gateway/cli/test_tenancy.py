"""Organizations, projects and their plans from the command line, in a real database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]

CONFIG = "[plan.default]\n[plan.gold]\ntokens_per_minute = 9\n"


@pytest.fixture
def installed(environ: dict[str, str], folder: Path) -> dict[str, str]:
    config = folder / "t.toml"
    config.write_text(CONFIG)
    environ["TOLLGATE_CONFIG"] = str(config)
    assert invoke(environ, "migrate").exit_code == 0
    return environ


def records(environ: dict[str, str], *arguments: str) -> list[dict[str, str]]:
    done = invoke(environ, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_org_a_project_and_a_key_of_it(installed: dict[str, str]) -> None:
    (org,) = records(installed, "orgs", "create", "--name", "acme", "--plan", "gold")
    assert (org["name"], org["plan"]) == ("acme", "gold") and org["id"].startswith("org_")
    made = invoke(installed, "projects", "create", "--name", "x", "--org", "acme")
    assert made.exit_code == 0 and made.stdout.endswith(" is project x of acme.\n")
    first, project = records(installed, "projects", "list", "--org", "acme")
    assert made.stdout.startswith(project["id"]) and project["org_id"] == org["id"]
    assert (first["name"], first["org_id"]) == ("default", org["id"])
    keys = ("keys", "create", "--name", "k", "--org", "acme", "--project", "x")
    (key,) = records(installed, *keys)
    assert (key["org_id"], key["project_id"]) == (org["id"], project["id"])
    (key,) = records(installed, "keys", "create", "--name", "k", "--org", "acme")
    assert key["project_id"] == first["id"]
    absent = invoke(installed, "keys", "create", "--name", "k", "--org", "acme", "--project", "y")
    assert absent.stderr.endswith("no project 'y' in the organization; it has 'default', 'x'\n")
    header, *lines = invoke(installed, "orgs", "list").stdout.splitlines()
    assert header.split() == ["ID", "CREATED", "PLAN", "NAME"]
    assert [line.split()[2:] for line in lines] == [["-", "default"], ["gold", "acme"]]
    header, *lines = invoke(installed, "projects", "list").stdout.splitlines()
    assert header.split() == ["ID", "CREATED", "PLAN", "ORG", "NAME"]
    assert [line.split()[3:] for line in lines] == [
        ["default", "default"],
        ["acme", "default"],
        ["acme", "x"],
    ]


def test_plans_are_given_and_taken(installed: dict[str, str]) -> None:
    for group in ("orgs", "projects"):
        given = invoke(installed, group, "set-plan", "default", "--plan", "gold")
        assert given.exit_code == 0 and given.stdout.endswith(" has plan gold.\n"), given.output
        assert [each["plan"] for each in records(installed, group, "list")] == ["gold"]
        taken = invoke(installed, group, "set-plan", "default", "--no-plan")
        assert taken.exit_code == 0 and taken.stdout.endswith(" has no plan.\n")
        assert [each["plan"] for each in records(installed, group, "list")] == [None]


def test_the_texts_of_a_projects_requests_are_stored_or_not(installed: dict[str, str]) -> None:
    for state, end in (("on", "requests for 7 days"), ("off", "those that it had are erased")):
        said = invoke(installed, "projects", "set-content", state, "default")
        assert said.exit_code == 0 and said.stdout.endswith(f"{end}.\n"), said.output
        [project] = records(installed, "projects", "list")
        assert project["store_content"] is (state == "on")


def test_a_key_is_narrowed_and_rotated(installed: dict[str, str]) -> None:
    narrow = ("--model", "a", "--model", "b", "--ip-range", "10.0.0.0/8")
    limits = ("--tokens-per-minute", "7", "--max-concurrent-streams", "1")
    (key,) = records(installed, "keys", "create", "--name", "k", *narrow, *limits)
    assert (key["models"], key["ip_ranges"]) == (["a", "b"], ["10.0.0.0/8"])
    assert (key["tokens_per_minute"], key["requests_per_minute"]) == (7, None)
    (fresh,) = records(installed, "keys", "rotate", key["id"], "--grace-s", "60")
    assert fresh["id"] == key["id"] and fresh["key"] != key["key"]
    assert fresh["previous_hint"] == "sk-tg-..." + key["key"][-4:]
    said = invoke(installed, "keys", "rotate", key["id"])
    assert said.exit_code == 0 and "Keep the key" in said.stdout
    assert "The one before stays valid until" in said.stdout


def test_origins_and_models(installed: dict[str, str]) -> None:
    said = invoke(installed, "orgs", "set-origins", "default", "--origin", "https://a.example")
    assert said.exit_code == 0 and said.stdout.endswith(" answers pages of https://a.example.\n")
    assert invoke(installed, "orgs", "set-origins", "default").stdout.endswith(" of nobody.\n")
    for flags, end in ((("--allow", "b", "--allow", "a"), "allow_list a, b"), ((), "all models")):
        said = invoke(installed, "projects", "set-models", "default", *flags)
        assert said.exit_code == 0 and said.stdout.endswith(f" has {end}.\n"), said.output
    both = invoke(installed, "projects", "set-models", "default", "--allow", "a", "--deny", "b")
    assert both.exit_code == 2 and "either --allow or --deny" in both.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("orgs", "create", "--name", "default"), "name: there is an organization 'default'"),
        (("orgs", "create", "--name", "b", "--plan", "lead"), "plan: no plan 'lead'"),
        (("orgs", "set-plan", "nope", "--no-plan"), "org: no organization 'nope'"),
        (
            ("users", "link", "--email", "no@a.example"),
            "email: no user of default has this address",
        ),
        (("projects", "create", "--name", "b", "--org", "nope"), "org: no organization 'nope'"),
        (("projects", "create", "--name", "default"), "name: the organization has a project"),
        (("projects", "list", "--org", "nope"), "org: no organization 'nope'"),
        (("projects", "set-plan", "nope", "--no-plan"), "project: no project 'nope' in"),
        (("projects", "set-plan", "default", "--plan", "lead"), "plan: no plan 'lead'"),
    ],
)
def test_a_mistake_is_one_line(
    installed: dict[str, str], arguments: tuple[str, ...], line: str
) -> None:
    done = invoke(installed, *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"tollgate: {line}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("flags", [(), ("--plan", "gold", "--no-plan")])
def test_a_plan_is_given_or_taken_and_not_both(flags: tuple[str, ...]) -> None:
    done = invoke({}, "orgs", "set-plan", "default", *flags)
    assert done.exit_code == 2 and "either --plan NAME or --no-plan" in done.stderr
