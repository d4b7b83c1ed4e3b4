"""GBNF: what is read is what is generated, what cannot be read is refused where it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Grammar
from engine.runner.grammar.constraint import MatcherTokenizer, Vocabulary, compile_grammar
from engine.text.output_parser.grammars.ebnf import (
    MAX_EBNF_BYTES,
    MAX_EBNF_NESTING,
    MAX_EBNF_RULES,
    EbnfError,
    ebnf_to_lark,
    is_ebnf,
)
from tests.budget import examples

PENNY = Path("models/penny/tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer() -> MatcherTokenizer:
    return MatcherTokenizer(Vocabulary(str(PENNY), 4096, (0,)))


def takes(text: str, said: str, tokenizer: MatcherTokenizer) -> bool:
    matcher = compile_grammar(Grammar(kind="ebnf", text=text), tokenizer)
    ids = tokenizer.tokenizer.tokenize_str(said)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


READ = [
    ('root ::= "a" | "b"', ["a", "b"], ["", "ab", "c"]),
    ('root ::= start\nstart ::= "a"+ # more\n', ["a", "aaa"], ["", "b"]),
    ('root ::= foo-bar\n  | fooBar\nfooBar ::= "b"\nfoo-bar ::= "a"', ["a", "b"], ["ab"]),
    ('root ::= word "b"\nword ::= [a-z]+', ["ab", "bb", "abab"], ["b", "a"]),
    ('root ::= "a" | ', ["", "a"], ["b"]),
    ('root ::= ("x" ("y" | ) ){2,3}', ["xx", "xyx", "xyxyxy"], ["x", "xxxx"]),
    (r'root ::= "\"\\\n\u00e9\x41/"', ['"\\\né' + "A/"], ["A"]),
    (r"root ::= [\]\-^&&a/]", list("]-^&a/"), list("b\\[")),
    (r"root ::= [^a-c\n]", list("d-^é"), list("abc\n")),
    ("root ::= [+--]", list("+,-"), list("*.")),
    ("root ::= [a-]", list("a-"), list("b")),
    ("root ::= .", list("a\n/é"), ["", "ab"]),
    ('root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(", "())"]),
    ("root ::= LETTER\nLETTER ::= [ab]{ 1 , 2 }", ["a", "ab"], ["aba"]),
    ('root ::= "a"{2} "b"{1,}', ["aab", "aabbb"], ["aa", "ab"]),
]


@pytest.mark.parametrize(("text", "fit", "unfit"), READ, ids=[text for text, _, _ in READ])
def test_a_grammar_takes_what_it_says(
    text: str, fit: list[str], unfit: list[str], tokenizer: MatcherTokenizer
) -> None:
    assert is_ebnf(text)
    assert [said for said in fit if not takes(text, said, tokenizer)] == []
    assert [said for said in unfit if takes(text, said, tokenizer)] == []


CHARS = 'ab]^-&~[\\/"\n.é#:= '


@settings(max_examples=examples(60), deadline=None)
@given(
    members=st.text(CHARS, min_size=1, max_size=5),
    literal=st.text(CHARS, min_size=1, max_size=5),
    negated=st.booleans(),
)
def test_texts_and_classes_mean_their_characters(
    members: str, literal: str, negated: bool, tokenizer: MatcherTokenizer
) -> None:
    coded = "".join(f"\\x{ord(char):02x}" for char in members)
    quoted = literal.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    text = f'root ::= "{quoted}" c\nc ::= [{"^" if negated else ""}{coded}]'
    for char in CHARS:
        assert takes(text, literal + char, tokenizer) == ((char in members) != negated)
    assert not takes(text, literal, tokenizer)


RULES = "\n".join(f'r{number} ::= "a"' for number in range(MAX_EBNF_RULES))
REFUSED = {
    'r ::= "a"': "without a rule 'root'",
    'root ::= "a" nowhere': "line 1: 'nowhere' names a rule that is not there",
    'root ::= "a"\nroot ::= "b"': "line 2: .*second definition",
    'root ::= ("a"\nb ::= "c"': "line 2: .*before a bracket is closed",
    "root ::= ": None,
    'root ::= "a")': "closes no bracket",
    "root ::= * a": "repeats nothing",
    'root ::= "a"+*': "repeats nothing",
    'root ::= "a"{3,2}': "at most fewer",
    'root ::= "a"{0,1001}': "more than 1000 times",
    'root ::= "a': "cannot be read",
    "root ::= [": "cannot be read",
    "root ::= []": "class of nothing",
    "root ::= [z-a]": "ends before it begins",
    r'root ::= "\q"': "unknown escape",
    r'root ::= "\ud800"': "half of a character",
    r'root ::= "\UFFFFFFFF"': "no character",
    'root ::= (= "a")': "cannot be read",
    '"a" root ::= "b"': "before the first rule",
    f"root ::= r1\n{RULES}": f"more than {MAX_EBNF_RULES} rules",
    "root ::= " + "(" * (MAX_EBNF_NESTING + 1): f"more than {MAX_EBNF_NESTING} deep",
    "root ::= " + "a" * MAX_EBNF_BYTES: f"more than {MAX_EBNF_BYTES} bytes",
}


@pytest.mark.parametrize(
    ("text", "why"), REFUSED.items(), ids=[f"{text[:20]!a}-{why}" for text, why in REFUSED.items()]
)
def test_what_cannot_be_read_is_refused_where_it_stands(text: str, why: str | None) -> None:
    if why is None:
        assert ebnf_to_lark(text) == 'start: ""'
        return
    with pytest.raises(EbnfError, match=why):
        ebnf_to_lark(text)


@given(st.text('ab"[]()|*+?{1,}\\\n#.-^:= root::=', max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    is_ebnf(text)
    try:
        lark = ebnf_to_lark("root ::= " + text)
    except EbnfError as error:
        assert re.match(r"EBNF", str(error))
    else:
        assert "start: " in lark
