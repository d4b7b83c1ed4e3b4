"""`X-Tollgate-Tags`, read strictly: what is no tag is refused by the header's name."""

from __future__ import annotations

import re

import pytest

from billing.ledger.tags import MAX_TAGS
from gateway.request_errors import BadField
from gateway.wire.usage.tags import HEADER_BYTES, TAGS_PATTERN, read_tags

EIGHT = ",".join(f"k{number}=v" for number in range(MAX_TAGS))


def read(*lines: str) -> dict[str, str]:
    return read_tags([(b"host", b"x"), *((HEADER_BYTES, line.encode("latin-1")) for line in lines)])


def test_tags_are_pairs_in_one_line_or_in_several() -> None:
    assert read("team=search,feature=chat") == {"team": "search", "feature": "chat"}
    assert read(" team=search ,\tfeature=a/b:c") == {"team": "search", "feature": "a/b:c"}
    assert read("team=search", "feature=chat") == {"team": "search", "feature": "chat"}
    assert len(read(EIGHT)) == MAX_TAGS
    assert re.search(TAGS_PATTERN, EIGHT) and re.search(TAGS_PATTERN, "a=b, c=d")


@pytest.mark.parametrize(
    "lines",
    [
        *([bad] for bad in ("", "team", "team=", "=x", "a=b,", ",a=b", "A=b", "a=b c", "a=\xe9")),
        *([bad] for bad in ("a=b,a=c", f"{EIGHT},more=v", "a=" + "v" * 65, "k" * 33 + "=v")),
        ["a=b", "a=b"],
        [EIGHT, "more=v"],
        [f"a={'v' * 64}," * 20],
    ],
)
def test_what_is_no_tag_is_refused_by_the_name_of_the_header(lines: list[str]) -> None:
    with pytest.raises(BadField) as caught:
        read(*lines)
    assert caught.value.param == "x-tollgate-tags"
