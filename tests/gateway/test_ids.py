"""Identifiers are what RFC 9562 says, however they are written."""

from __future__ import annotations

from uuid import RFC_4122, UUID

from gateway.ids import uuid7, uuid7_hex, uuid7_text


def test_each_way_of_writing_one_is_a_version_7_in_the_order_of_time() -> None:
    drawn = [uuid7(), UUID(uuid7_hex()), UUID(text := uuid7_text())]
    assert str(drawn[-1]) == text
    assert {(each.version, each.variant) for each in drawn} == {(7, RFC_4122)}
    milliseconds = [each.int >> 80 for each in drawn]
    assert milliseconds == sorted(milliseconds)


def test_none_is_drawn_twice() -> None:
    assert len({uuid7_hex() for _ in range(2000)}) == 2000
