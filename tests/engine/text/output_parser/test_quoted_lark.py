"""engine.text.output_parser.grammars.quoted_lark: a text stands quoted in a JSON string as the
grammar says of it plain, and what cannot be translated is named."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine.text.output_parser.grammars.quoted_lark import (
    COMMON,
    MAX_LARK_BYTES,
    MAX_LARK_CLASSES,
    MAX_LARK_RULES,
    LarkError,
    quoted_lark,
)
from tests.budget import examples

BYTES = LLTokenizer("byte")
PATCH = r"""
// How files are to be changed.
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?

hunk: "*** File: " name LF lines
    | "*** Delete: " name LF -> deletion
name: /(.+)/
?lines.2: ("+" | "-" | " ") /(.*)/ LF lines?   # any
%import common.LF
"""
GOOD_PATCH = '*** Begin\n*** File: a "b".py\n+\\n = "x"\n-\ty\n*** Delete: ü\n*** End'


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def takes(grammar: str, text: str) -> bool:
    """Whether the quoted grammar matches a text as it stands in a JSON string."""
    return matches(quoted_lark(grammar), json.dumps(text, ensure_ascii=False)[1:-1])


def test_a_grammar_of_patches() -> None:
    assert takes(PATCH, GOOD_PATCH)
    assert takes(PATCH, GOOD_PATCH + "\n")
    for wrong in ("", "*** Begin\n*** End", GOOD_PATCH[:-1], GOOD_PATCH.replace("File", "Fail")):
        assert not takes(PATCH, wrong)
    assert not matches(quoted_lark(PATCH), GOOD_PATCH), "nothing in it may stand as it is"


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r"start: /[\s\S]+/", 'a"\\\n\x00\t\x7fü🙂', ""),
        (r"start: /a.c/", 'a"c', "a\nc"),
        ("start: /a.c/s", "a\nc", "ac"),
        ("start: /a[b-d]/i", "AC", "AE"),
        ('start: "Ab"i', "aB", "AC"),
        ('start: "a".."c"', "b", "d"),
        (r'start: "\"".."$"', '"', "%"),
        (r'start: "\t\\\""', '\t\\"', "t"),
        ('start: ["a"] ("b" | "c")~2..3', "abcb", "ab"),
        ('start: "a"~2', "aa", "aaa"),
        ('start: (NAME | "if") "!"\nNAME: /[a-z]+/', "ifx!", "i1!"),
        ('start: ("if" "1" | NAME "2")\nNAME: /[a-z]+/', "if2", "x1"),
        ("start: A\nA: B /b/ | [C] ~ 2\nB: /[a-z]+/\nC: /\\n/", "abb", "b\n"),
        ('start: /"[^"]*"/ LF?\nLF: "\\n"', '"a\\\n"\n', '"a'),
        (r"start: /[ \t]*\/\/ x:[^\r\n]*/ /\r?\n/", "\t // x:\\y\n", "// x\n"),
        (r'start: /"([^"\\]|\\.)*"/', '"a\\"b"', '"a"b"'),
        ("start: A{1,2} B{2}\nA: /a/\nB: /b/{0,1}", "aab", "aaabbb"),
        (r"start: /\w+\W\d{2,3}\S/", "é_ 12x", "é_ 1 x"),
        (r"start: /[^\r\n]*\r?\n/", 'x\\"\r\n', "x"),
        (r"start: /\x41\u00e9\//", "Aé/", "A/"),
        (r"start: /a*?b+?c{0,2}/", "aab", "aa"),
        ("start: a\na: B | C\nB: /x/\nC: /xy/", "xy", "y"),
        ("start: A+\nA: /[a-z]+/ | /[0-9]/", "ab1c", "ab-"),
        ("start: NUMBER\n%import common.NUMBER", "1.5e-3", "e"),
        ("start: INT WS WORD\n%import common (INT, WS, WORD)", "1 \n\tx", "1x"),
        ("start: ESCAPED_STRING\n%import common.ESCAPED_STRING", '"a\\"b"', '"a'),
        ('!start: (a b)+\n?a: "a"\n_b: "b"\nb: _b', "abab", "aba"),
    ],
)
def test_texts_of_a_grammar(grammar: str, good: str, bad: str) -> None:
    assert takes(grammar, good)
    assert not takes(grammar, bad)


@pytest.mark.parametrize("name", sorted(COMMON))
def test_what_can_be_imported_is_read(name: str) -> None:
    assert quoted_lark(f"start: {name}\n%import common.{name}")


PARTS = [
    "(a|b)",
    "(\\n|x)",
    '([^"]|b)',
    "(ab?)",
    "[a-c]",
    r"[^\n]",
    r"[\s\S]",
    ".",
    '["x]',
    r"\d",
    r"\S",
    r"[^\w\\]",
    "[ -~]",
    "a",
    r"\"",
]


@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(PARTS), st.sampled_from(["", "", "*", "+", "?", "{2}", "|"])),
        max_size=5,
    ),
    st.text(st.sampled_from('abx"\\\n\t\x01 9é-/'), max_size=5),
)
def test_a_regular_expression_matches_as_it_does_elsewhere(
    parts: list[tuple[str, str]], text: str
) -> None:
    regex = "".join(one + times for one, times in parts) or "a"
    assert takes(f"start: /{regex}/", text) == (re.fullmatch(regex, text) is not None)


def doubled(times: int) -> str:
    """A grammar each of whose terminals is two of the next one."""
    lines = [f"A{number}: A{number + 1} A{number + 1}" for number in range(times)]
    return "\n".join(["start: A0", *lines, f"A{times}: /x/"])


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("", "without a rule 'start'"),
        ("start: A\nA: B\nB: A", "within a terminal"),
        ('start: A\nA: b\nb: "x"', "within a terminal"),
        ("start: /" + "[a-c]" * (MAX_LARK_CLASSES + 1) + "/", "classes"),
        (doubled(18), "too long"),
        ("start: b", "names a rule that is not there"),
        ('b: "x"', "without a rule 'start'"),
        ('start: "x"\n%ignore " "', "'%ignore"),
        ("start: X\n%import common.NOTHING", "imports NOTHING"),
        ("start: X\n%import python.X", "'%import"),
        ('start: "x"\nstart: "y"', "second definition"),
        ('start: ("x"', "before a bracket is closed"),
        ('start: "x")', "closes no bracket"),
        ('start: "x', "cannot be read"),
        ("start: <[1]>", "cannot be read"),
        ("start: %json {}", "'%json"),
        ('"x"', "outside of a rule"),
        ("start: /(?=x)/", "not supported"),
        (r"start: /\bx/", "not supported"),
        (r"start: /(x)\1/", "not supported"),
        ("start: /[a&&b]/", "not supported"),
        (r"start: /\p{L}/", "not supported"),
        ("start: /^x$/", "not supported"),
        ("start: /(x/", "not closed"),
        ("start: /x/u", "flags"),
        ("start: /x{1001}/", "repeats"),
        ("start: /x{0}/", "never"),
        ("start: /x+*/", "repeats nothing"),
        ("start: /a|*/", "repeats nothing"),
        ('start: "x"~3..2', "repeats"),
        ('start: "b".."a"', "no range"),
        (r'start: "\ud800"', "half of a character"),
        ("start: " + "(" * 65, "deep"),
        ("\n".join(f'a{number}: "x"' for number in range(MAX_LARK_RULES + 1)), "rules"),
        ("x" * (MAX_LARK_BYTES + 1), "bytes"),
    ],
)
def test_what_cannot_be_translated_is_named(grammar: str, said: str) -> None:
    with pytest.raises(LarkError, match=re.escape(said)):
        quoted_lark(grammar)
