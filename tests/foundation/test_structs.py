"""Structs that are made of others decode, refuse and describe themselves as written ones do."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import UNSET, Meta, UnsetType

from foundation.structs import given, patch_of, with_fields

Amount = Annotated[int, Meta(ge=0, le=9)]


class Create(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    size: Amount | None = None
    tags: list[str] = []


@patch_of(Create, without=("tags",))
class Patch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change."""


class View(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A thing as it is shown."""

    id: str
    size: str = "unknown"
    tags: list[str] = msgspec.field(default_factory=list, name="labels")

    def shown(self) -> str:
        return f"{self.id}: {self.size}"


def schema(kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.schema(kind)["$defs"][kind.__name__]
    return found


def test_a_patch_names_some_fields_of_what_is_created() -> None:
    decode = msgspec.json.Decoder(Patch).decode
    assert given(decode(b"{}")) == {}
    assert given(decode(b'{"size": null, "name": "a"}')) == {"name": "a", "size": None}
    assert Patch.__doc__ == schema(Patch)["description"] == "A change."


def test_a_patch_keeps_the_fields_that_only_a_change_has() -> None:
    @patch_of(Create, without=("tags",))
    class WithOwn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        enabled: bool | UnsetType = UNSET

    found = given(msgspec.json.decode(b'{"size": 3, "enabled": false}', type=WithOwn))
    assert found == {"size": 3, "enabled": False}
    assert WithOwn.__struct_fields__[-1] == "enabled"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"size": 10}', "Expected `int` <= 9 - at `$.size`"),
        (b'{"name": null}', "Expected `str`, got `null` - at `$.name`"),
        (b'{"tags": []}', "Object contains unknown field `tags`"),
    ],
)
def test_a_patch_refuses_what_creation_refuses(body: bytes, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(body, type=Patch)
    assert str(refused.value) == said


def test_fields_are_added_in_their_place() -> None:
    class Written(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
        """A thing as it is shown."""

        id: str
        first: Amount | None = None
        size: Amount | None = None
        tags: list[str] = msgspec.field(default_factory=list, name="labels")

    made = with_fields(("first", "size"), Amount | None, None, after="id")(View)
    assert made.__struct_fields__ == ("id", "first", "size", "tags")
    assert made.__name__ == "View" and made.__module__ == __name__
    assert schema(made) == {**schema(Written), "title": "View"}
    one = msgspec.convert({"id": "x", "first": 3}, made)
    assert msgspec.json.encode(one) == b'{"id":"x","first":3}' and one.shown() == "x: None"
    assert View.__struct_fields__ == ("id", "size", "tags"), "the class itself stays as it is"
    with pytest.raises(AttributeError):
        one.id = "y"


def test_fields_without_a_place_come_last_and_may_be_required() -> None:
    made = with_fields(["last"], int | UnsetType, UNSET)(with_fields(["first"], int)(View))
    assert made.__struct_fields__[-2:] == ("first", "last")
    assert schema(made)["required"] == ["id", "first"]
