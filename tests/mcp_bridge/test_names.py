"""Aliases are legal, stable and one to one."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mcp_bridge.errors import NameRefused
from mcp_bridge.names import IDENTITY, alias_of, build_aliases, checked_label

labels = st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,5}", fullmatch=True)
legal_names = st.text(
    "abcXYZ019_-", min_size=1, max_size=70
)  # short alphabets collide if anything does
any_names = st.one_of(legal_names, st.text(min_size=1, max_size=200))


@given(labels, any_names)
def test_an_alias_is_what_clients_take(label: str, name: str) -> None:
    alias = alias_of(label, name)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", alias)
    assert alias.split("__", 1)[0] == label
    assert alias == alias_of(label, name)


@given(st.lists(st.tuples(labels, any_names), max_size=30, unique=True))
def test_the_map_is_one_to_one(named: list[tuple[str, str]]) -> None:
    made = build_aliases(named)
    assert made.refused == ()
    assert len(made.targets) == len(made.aliases) == len(named)
    for server, name in named:
        alias = made.alias_of(server, name)
        assert alias is not None and made.target_of(alias) == (server, name)


@given(labels, any_names, st.lists(st.tuples(labels, any_names), max_size=5))
def test_who_else_is_there_changes_no_alias(
    label: str, name: str, others: list[tuple[str, str]]
) -> None:
    everyone = {(label, name), *others}
    assert build_aliases(everyone).alias_of(label, name) == alias_of(label, name)


@given(labels, any_names)
def test_a_tool_cannot_name_itself_as_another_is_shortened(label: str, name: str) -> None:
    taken = alias_of(label, name).split("__", 1)[1]
    if taken != name:
        assert alias_of(label, taken) != alias_of(label, name)


@given(any_names)
@example("test_input_required_result_elicitation")
def test_the_identity_namespace_keeps_legal_names(name: str) -> None:
    alias = alias_of(IDENTITY, name)
    legal = re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) and not re.search(r"_x[a-z2-7]{12}$", name)
    assert (alias == name) == bool(legal)


def test_a_name_offered_twice_is_refused_by_name_each_time() -> None:
    made = build_aliases([("files", "read"), ("files", "read"), ("files", "write")])
    assert made.target_of("files__read") is None
    assert [(r.server, r.name, r.alias) for r in made.refused] == [
        ("files", "read", "files__read")
    ] * 2
    assert made.target_of("files__write") == ("files", "write")


def test_servers_whose_names_run_together_stay_apart() -> None:
    made = build_aliases([("a", "b__c"), ("a", "_b"), ("a-b", "c")])
    assert sorted(made.targets) == ["a-b__c", "a___b", "a__b__c"]
    assert made.refused == ()


@pytest.mark.parametrize("label", ["", "A", "a_b", "a__b", "-a", "a-", "a--b", "é", "a" * 25])
def test_a_label_that_could_be_read_two_ways_is_refused(label: str) -> None:
    with pytest.raises(NameRefused, match="label"):
        checked_label(label)


def test_an_empty_name_takes_nothing_else_with_it() -> None:
    made = build_aliases([("files", ""), ("files", "x" * 2_000), ("files", "read")])
    assert [r.alias for r in made.refused] == ["", ""]
    assert made.target_of("files__read") == ("files", "read")


def test_identity_is_for_one_upstream() -> None:
    with pytest.raises(NameRefused, match="identity"):
        build_aliases([(IDENTITY, "a"), ("files", "a")])


def test_the_map_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp_bridge.names.MAX_ALIASES", 2)
    with pytest.raises(NameRefused, match="more than 2"):
        build_aliases([("a", "1"), ("a", "2"), ("a", "3")])
