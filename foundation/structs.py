"""Makes msgspec structs of one another, so that a field is declared once.

The types that these decorators return are keyword-only. A type checker sees the fields that stand
in the class; the others are for what is written and read by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MemberDescriptorType
from typing import Any, TypeVar, cast

import msgspec
from msgspec import NODEFAULT, UNSET, UnsetType
from msgspec.structs import FieldInfo

S = TypeVar("S", bound=msgspec.Struct)


def with_fields(
    names: Iterable[str], kind: Any, default: Any = NODEFAULT, *, after: str = ""
) -> Callable[[type[S]], type[S]]:
    """Add a field of `kind` for each of `names` behind the field `after`, or at the end. One that
    the class has already becomes of `kind` where it stands."""

    def add(cls: type[S]) -> type[S]:
        added = {name: FieldInfo(name, name, kind, default) for name in names}
        fields: dict[str, FieldInfo] = {}
        for name, each in _fields(cls).items():
            fields[name] = added.get(name, each)
            if name == after:
                fields |= added
        return _made_anew(cls, fields | added)

    return add


def with_fields_of(
    other: type[msgspec.Struct], *, without: Collection[str] = ()
) -> Callable[[type[S]], type[S]]:
    """Add each field of `other`, as it is there."""
    added = {name: each for name, each in _fields(other).items() if name not in without}
    return lambda cls: _made_anew(cls, _fields(cls) | added)


def patch_of(
    create: type[msgspec.Struct], *, without: Collection[str] = ()
) -> Callable[[type[S]], type[S]]:
    """Add each field of `create`, with its type, so that it may be left out (RFC 7396), before
    those of the class."""
    added = {
        name: FieldInfo(name, each.encode_name, each.type | UnsetType, UNSET)
        for name, each in _fields(create).items()
        if name not in without
    }
    return lambda cls: _made_anew(cls, added | _fields(cls))


def given(patch: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that a patch names; null stands for None."""
    fields = msgspec.structs.asdict(patch)
    return {name: value for name, value in fields.items() if value is not UNSET}


def _fields(cls: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    return {each.name: each for each in msgspec.structs.fields(cls)}


def _made_anew(cls: type[S], fields: Mapping[str, FieldInfo]) -> type[S]:
    """Return `cls` with these fields, in this order."""
    config = cls.__struct_config__
    kept = {
        name: value
        for name, value in vars(cls).items()
        if name not in ("__annotations__", "__slots__")
        and not isinstance(value, MemberDescriptorType)
    }
    made: Any = msgspec.defstruct(
        cls.__name__,
        [(each.name, each.type, _default_of(each)) for each in fields.values()],
        bases=cls.__bases__,
        module=cls.__module__,
        namespace=kept,
        kw_only=True,
        frozen=config.frozen,
        forbid_unknown_fields=config.forbid_unknown_fields,
        omit_defaults=config.omit_defaults,
    )
    return cast(type[S], made)


def _default_of(field: FieldInfo) -> Any:
    if field.default_factory is not NODEFAULT:
        return msgspec.field(default_factory=field.default_factory, name=field.encode_name)
    return msgspec.field(default=field.default, name=field.encode_name)
