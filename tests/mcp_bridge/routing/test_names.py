"""Aliases are legal, stable and one to one."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mcp_bridge.errors import NameRefused
from mcp_bridge.names import IDENTITY, ShortenedNames, alias_of, checked_label

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
    assert len({alias_of(*each) for each in named}) == len(named)


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


def test_names_of_which_the_same_was_made_are_refused_by_name() -> None:
    """Both, whichever came first and however often, and no other one with them."""
    known = ShortenedNames()
    known.note("one_x1", "the first")
    known.note("two_x2", "another")
    known.note("one_x1", "the first")
    assert known.get("one_x1") == "the first"
    for name in ("the second", "the first"):
        with pytest.raises(NameRefused, match=f"'{name}' and another name have one alias: one_x1"):
            known.note("one_x1", name)
    assert known.get("one_x1") is None and known.get("two_x2") == "another"
    assert known.get("three") is None


def test_what_is_remembered_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp_bridge.names.MAX_SHORTENED", 2)
    known = ShortenedNames()
    for number in range(5):
        known.note(f"made {number}", "name")
    assert [known.get(f"made {number}") for number in range(5)] == [None] * 4 + ["name"]


def test_servers_whose_names_run_together_stay_apart() -> None:
    made = [alias_of(*each) for each in (("a", "b__c"), ("a", "_b"), ("a-b", "c"))]
    assert made == ["a__b__c", "a___b", "a-b__c"]


@pytest.mark.parametrize("label", ["", "A", "a_b", "a__b", "-a", "a-", "a--b", "é", "a" * 25])
def test_a_label_that_could_be_read_two_ways_is_refused(label: str) -> None:
    with pytest.raises(NameRefused, match="label"):
        checked_label(label)


@pytest.mark.parametrize("name", ["", "x" * 2_000])
def test_an_empty_or_endless_name_is_refused(name: str) -> None:
    with pytest.raises(NameRefused, match="'files': a name has 1 to 1024"):
        alias_of("files", name)
