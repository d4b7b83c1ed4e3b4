"""Finds the number with which a JSON document gets slow to read, before it is read: reading keeps
the event loop.

An integer takes time with the square of its digits, and a float near zero the slow path of the
decoder: 10 us, where others take 0.03 us. Documents come from strangers, so no search backtracks;
one without a long run of digits and with few hyphens costs a sample of its bytes and one
`bytes.count`.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import NamedTuple

MAX_NUMBER_CHARS = 256
"""A float has 17 digits that count, an id 20, an amount of 256 bits 78. 15 MB of numbers this long
are read in 50 ms, of 4,300 digits in 0.3 s; the decoder refuses longer ones by itself."""
MAX_SMALL_NUMBERS = 1000
"""They take 10 ms. Few are near 1e-100: a schema has the smallest float as its bound, say."""

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
"""Up to the end of the document, if nothing closes it."""
_LONG = rb"[0-9.eE+-]{%d}" % (MAX_NUMBER_CHARS + 1)
_SMALL = rb"[0-9.]*+[eE]-[0-9]{3}|[0-9.]{41,}+[eE]-"
_FIND = rb'(?:(?>[^"0-9]++|%b|(?!%b)[0-9][0-9.eE+-]*+))*+(?:(?P<number>[0-9][0-9.eE+-]*+)|\Z)'
"""All that is no such number, then the number. Without the atomic group Python before 3.11.5 goes
on behind what the lookahead saw (github.com/python/cpython/issues/106052)."""
_LONG_NUMBER = re.compile(_FIND % (_STRING, _LONG), re.DOTALL)
_SMALL_NUMBER = re.compile(_FIND % (_STRING, _SMALL), re.DOTALL)
_RUN = (MAX_NUMBER_CHARS - 1) // 2
"""The mantissa or the exponent of a number that is too long has more digits in a row."""
_STRIDE = 31
_SAMPLED_RUN = re.compile(rb"[0-9.]{%d}" % (_RUN // _STRIDE))
_TO_ZEROS = bytes.maketrans(b"123456789.", b"0" * 10)
_ZEROS = b"0" * _RUN


MAX_INDEX_DIGITS = 7
"""No list that is read has an index with more."""


class SlowNumber(NamedTuple):
    offset: int
    reason: str


def slow_number(document: bytes) -> SlowNumber | None:
    """Return the first number that is too long, or that is too small after many others."""
    if len(document) > MAX_NUMBER_CHARS and _may_be_long(document):
        found = _LONG_NUMBER.match(document)
        if found is not None and found["number"]:
            reason = f"a number of more than {MAX_NUMBER_CHARS} characters"
            return SlowNumber(found.start("number"), reason)
    if _may_be_small(document):
        one = next(islice(_SMALL_NUMBER.finditer(document), MAX_SMALL_NUMBERS, None), None)
        if one is not None and one["number"]:
            reason = f"more than {MAX_SMALL_NUMBERS} numbers close to zero"
            return SlowNumber(one.start("number"), reason)
    return None


def is_index(written: str) -> bool:
    """Tell whether it is an index as RFC 6901 writes it, of a list that can be."""
    return written.isdecimal() and written.isascii() and len(written) <= MAX_INDEX_DIGITS


def _may_be_long(document: bytes) -> bool:
    if _SAMPLED_RUN.search(document[::_STRIDE]) is None:
        return False
    return _ZEROS in document.translate(_TO_ZEROS)


def _may_be_small(document: bytes) -> bool:
    if len(document) <= MAX_SMALL_NUMBERS * len(b"1e-100,"):
        return False
    if document.count(b"-") <= MAX_SMALL_NUMBERS:
        return False
    return document.count(b"e-") + document.count(b"E-") > MAX_SMALL_NUMBERS
