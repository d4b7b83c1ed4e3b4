"""The arguments of a call as one JSON object, also where they broke off.

What is whole stays as the model wrote it; of the beginning of an object what is not whole is left
out: a string without its end, a number that may go on, a key without its value. The official SDK
does the same with a stream that ends there, so that both come to the same.
"""

from __future__ import annotations

import re

import msgspec

EMPTY = "{}"
_TOKEN = re.compile(
    r'[ \t\n\r]*+(?:(?P<value>"(?:[^"\\\x00-\x1f]++|\\.)*+"'
    r"|(?:true|false|null|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)"
    r"(?![0-9.eE+-]))"
    r"|(?P<mark>[{}\[\],:]))"
)
_CLOSER = {"{": "}", "[": "]"}
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def to_object(text: str) -> str:
    """Return the object that a text begins; a text that begins none is wrapped in one."""
    if not text.strip():
        return EMPTY
    if is_object(text):
        return text
    closed = closed_object(text)
    if is_object(closed):
        return closed
    return msgspec.json.encode({"arguments": text}).decode()


def is_object(text: str) -> bool:
    try:
        _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


def closed_object(text: str) -> str:
    """Cut a text behind its last whole value and close it there. The result of a text that begins
    no object may be anything."""
    end = whole_until = 0
    open_: list[str] = []
    closers: list[str] = []
    in_key = False
    while (token := _TOKEN.match(text, end)) is not None:
        end, mark = token.end(), token["mark"]
        if mark in _CLOSER:
            open_.append(_CLOSER[mark])
            in_key = mark == "{"
        elif mark in ("}", "]"):
            if not open_ or open_.pop() != mark:
                break
        elif mark is not None:
            in_key = mark == "," and open_[-1:] == ["}"]
            continue
        elif in_key:
            continue
        whole_until, closers = end, open_[::-1]
    return text[:whole_until] + "".join(closers)
