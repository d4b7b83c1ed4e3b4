"""The bases of errors say what an error is about."""

from __future__ import annotations

import pytest

from foundation.errors import CodedError, LocatedError


class RefusedName(LocatedError):
    code = "refused_name"
    whole = "all names"


@pytest.mark.parametrize(
    ("param", "text"), [("name", "name: is taken"), ("", "all names: is taken")]
)
def test_a_located_error_names_its_place_first(param: str, text: str) -> None:
    error = RefusedName(param, "is taken")
    assert (str(error), error.param, error.message) == (text, param, "is taken")
    assert error.code == "refused_name"


def test_an_error_says_its_message_alone() -> None:
    error = CodedError("broken", param="x")
    assert (str(error), error.message, error.param, error.code) == ("broken", "broken", "x", None)
    assert CodedError("broken").param is None
