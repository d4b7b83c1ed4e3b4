"""Weighs whether a definition asks something of a model beyond describing itself.

`instruction_text` knows phrases; here the kinds of words that stand together in two neighbouring
sentences count, in any wording: something private and a verb that moves it, a negation and a verb
of telling. What the thing is about itself (its name, title and first sentence) is no evidence: a
secret scanner speaks of secrets. A text where no prose belongs (a default, an enum) is. One pass
over the words. It is less sure of itself than phrases, so it is for what a person approves, not for
every result. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import msgspec

from mcp_bridge.text_safety.instruction_words import BITS, cues_of

MAX_SENTENCES = 400
WIDEST = 2_000
SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？।])\s*|\n+")

PATTERNS: dict[str, str] = {
    "path": r"~/|(?<!\w)\.(?:ssh|env|aws|kube|netrc|npmrc|pypirc|gitconfig|pgpass|gnupg|docker)\b|"
    r"\bid_(?:rsa|ed25519)|/etc/(?:passwd|shadow|hosts|ssh)|/proc/|/home\b|\.(?:pem|p12|pfx|kdbx)\b|"
    r"known_hosts|authorized_keys|\bmcp\.json|(?-i:[A-Z]_(?:KEY|TOKEN|SECRET|PASSWORD)\b)|`(?:env|printenv|set)`",
    "param": r"`[\w.-]{1,64}`|'[a-z_]{2,40}'|\bthe \w+ (?:argument|parameter|field)\b",
    "address": r"[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]{1,64}|(?<![Ss]ee )https?://|\+\d[\d ]{6,}|"
    r"\b[A-Z]{2}\d\d(?: ?\w{4}){2,}|\baccount \d|\b[\w-]{2,40}\.(?:example|com|net|org|io)\b",
    "shell": r"\|\s?(?:sudo )?(?:ba|z)?sh\b|\bwget\b.{0,120}(?:&&|;)\s?(?:ba|z)?sh\b|"
    r"\bchmod (?:-r )?[0-7]{3,4}\b|~/\.(?:bashrc|zshrc|profile)\b|authorized_keys|\broot shell\b|"
    r"\brm -rf\b|/dev/tcp/|\bnc (?:\S+ ){0,3}-e\b|\bcrontab\b|/bin/(?:ba)?sh\b|--no-verify|"
    r"\$\(cat |auto_?approve|always_?allow|\.git/hooks",
    "lasting": r"\bCLAUDE\.md|\.cursorrules|AGENTS\.md|\b(?:rules?|settings|memory) files?\b|"
    r"\bsettings\.json|\byour memory\b",
    "marked": r"<\s?/?[a-z_-]{0,24}(?:instruction|system|assistant|policy|admin|important|secret|"
    r"critical|prompt)[a-z_-]{0,24}[^<>]{0,40}>|\[/?(?:inst|system|sys)\]|<\|[a-z_]{1,20}\|>|"
    r"#{2,} ?system\b|\bsystem (?:notice|message|override) ?:|\bnote to (?:the |any )?(?:ai|llm|"
    r"language model|assistant|model|agent)s?\b",
    "named": r"\b[a-z][a-z0-9]{1,40}_[a-z0-9_]{2,60}\b",
    "subject": r"(?:\b[a-z]+_[a-z_]+`?|\b(?:tool|function|connector|plugin|server)s?)"
    r"(?: of \w+)?(?: \w+)? (?:has|have|must|should|is|are|was|runs?|takes|needs?|works|accepts|"
    r"requires|gives?|returns)\b",
    "blank": r"\{\{?[^{}]{3,60}\}\}?|<[a-z][a-z' ]{3,60}>",
}
SIGNS: dict[str, tuple[str, ...]] = {
    "path": ("/", ".", "_", "`"),
    "param": ("`", "'", " argument", " parameter", " field"),
    "address": ("@", "//", "+", ".", "account", "0"),
    "shell": (
        "|",
        "sh",
        "chmod",
        "~/",
        "authorized",
        "rm ",
        "nc ",
        "cron",
        "-no-",
        "$(",
        "auto",
        "allow",
        "hooks",
    ),
    "lasting": (".md", "cursor", "rule", "setting", "memory"),
    "marked": ("<", "[", "##", "system ", "note to"),
    "named": ("_",),
    "subject": ("_", "tool", "function", "connector", "plugin"),
    "blank": ("{", "<"),
}
ADDRESS = re.compile(r"https?://[^\s\"'`)>]{1,2048}")
ORDINARY = re.compile(
    r"\b(?:page|next|continuation|cursor|sync|max|input|output)[ _]?tokens?\b"
    r"|\b(?:error|log|commit|status) messages?\b"
)
"""Tokens that are no secret, and messages that nobody sends."""
COMPILED = {name: re.compile(one, re.IGNORECASE) for name, one in PATTERNS.items()}
CONTEXT = ("private", "mentioned", "model", "elsewhere", "argument", "value")
"""Names what a sentence has beside its words. `private`: something private that the
thing is not about, and that nothing forbids to move; `mentioned`: also where that is forbidden;
`model`: the reader is a model, and the thing is not about models; `elsewhere`: work of another
kind than the thing's own; `argument`, `value`: where."""
ALL = {name: 1 << at for at, name in enumerate((*BITS, *PATTERNS, *CONTEXT))}
PRIVATE = sum(ALL[name] for name in ("secret", "machine", "personal", "talk", "path"))
ACTIVITIES = sum(
    ALL[name] for name in "mail calendar payment code files posts travel data shellish".split()
)
TOPIC = PRIVATE | ACTIVITIES | ALL["ai"]

Place = Literal["description", "argument", "value"]
RULES: tuple[tuple[int, str, str], ...] = (
    (9, "private", "private"),
    (6, "private", "private talk"),
    (5, "private", "private path"),
    (17, "private", "private move"),
    (4, "private", "private read"),
    (12, "private", "private param|address|sink"),
    (6, "private", "private must|pretext"),
    (6, "private", "private you|ai"),
    (10, "private", "private whole"),
    (10, "private", "private talk whole"),
    (4, "private", "private when"),
    (17, "private", "mentioned argument"),
    (32, "private", "mentioned value"),
    (8, "private", "mentioned pretext"),
    (-5, "", "mentioned barred -hide"),
    (12, "private", "blank secret|machine|personal|talk|path"),
    (1, "private", "secret|machine|personal|talk|path move sink|address|param"),
    (23, "conceals", "not tell user"),
    (5, "conceals", "not tell"),
    (21, "conceals", "hide"),
    (12, "conceals", "hide user|you|ai"),
    (8, "conceals", "quiet move|deal"),
    (19, "overrides", "not guard"),
    (21, "overrides", "void guard"),
    (12, "overrides", "void rules"),
    (15, "overrides", "void rules you|ai|when"),
    (23, "overrides", "persona"),
    (19, "overrides", "authority"),
    (8, "overrides", "authority guard|rules|not|move"),
    (21, "overrides", "argument void|persona"),
    (22, "overrides", "argument not guard|tell"),
    (19, "obeys", "act output -not"),
    (18, "obeys", "act user|authority -not"),
    (7, "obeys", "act rules -not"),
    (9, "claims", "others"),
    (12, "claims", "others swap|bad|best|void"),
    (5, "claims", "others must"),
    (8, "claims", "others bad|best"),
    (6, "claims", "others when"),
    (8, "claims", "others deal"),
    (6, "claims", "best"),
    (16, "claims", "best others|bad"),
    (24, "claims", "subject swap|bad"),
    (11, "claims", "subject must"),
    (15, "claims", "named swap"),
    (22, "claims", "named bad"),
    (2, "claims", "bad"),
    (5, "redirects", "address -example"),
    (8, "redirects", "address when|must -example"),
    (9, "redirects", "address move|swap -example"),
    (12, "redirects", "address swap"),
    (16, "redirects", "deal swap each|when|must"),
    (15, "redirects", "deal address each|when|swap|must -example"),
    (13, "redirects", "each answer"),
    (8, "redirects", "answer must you|each|move"),
    (3, "triggers", "when move user"),
    (5, "claims", "rather others|bad"),
    (8, "redirects", "rather address"),
    (3, "claims", "rather elsewhere"),
    (5, "conceals", "lacks tell user"),
    (12, "addresses", "model"),
    (10, "addresses", "model must|move|read"),
    (18, "addresses", "value you|ai|must|move|act|void|hide|persona"),
    (15, "addresses", "value ai|you"),
    (2, "addresses", "argument you"),
    (8, "addresses", "value blank"),
    (27, "loops", "drain"),
    (34, "runs_command", "shell"),
    (32, "poses_as_system", "marked"),
    (26, "runs_command", "lasting move|void|swap"),
    (5, "claims", "elsewhere"),
    (8, "claims", "elsewhere must|each"),
    (6, "claims", "elsewhere when"),
    (10, "claims", "elsewhere swap"),
    (10, "claims", "elsewhere subject"),
    (11, "redirects", "elsewhere address"),
    (8, "claims", "elsewhere destroy"),
    (8, "claims", "elsewhere only"),
    (3, "claims", "elsewhere move"),
    (2, "claims", "elsewhere you|user"),
    (5, "claims", "elsewhere permit"),
    (6, "claims", "elsewhere param"),
    (11, "claims", "this best|each|only|must|not"),
    (5, "claims", "this"),
    (10, "private", "we private"),
    (10, "private", "we move|read"),
    (6, "private", "we"),
    (10, "overrides", "permit not|void|guard"),
    (5, "overrides", "permit you|model|we"),
    (9, "overrides", "principal"),
    (10, "conceals", "hide answer|you"),
    (10, "conceals", "not answer you"),
    (8, "loops", "drain when|not|each"),
    (5, "", "sink"),
    (4, "", "move sink"),
    (3, "", "pretext"),
    (-9, "", "guard user|must|read|when -not"),
    (-10, "", "example"),
)
"""Tenths that a sentence scores for what stands together in it, and what that is called. `a|b`:
either; `-a`: without. Set by hand, then corrected by a logistic regression (L2 about these, the
highest sentence of a definition) to the part of the corpus that is not held out; see
tests/mcp_bridge/trust/poisoning.py."""
BASE = -22
"""The score of a sentence in which nothing stands together."""
THRESHOLD = 0
CLEAR = 14
"""The score from which a first sentence asks, rather than says what a thing is about."""
SURE = 28
"""The score from which a text asks beyond doubt."""


class CompiledRule(msgspec.Struct, frozen=True):
    """A rule in bits: all of `needed`, one of each of `either`, none of `without`."""

    bit: int
    needed: int
    either: tuple[int, ...]
    without: int


def compile_rule(at: int, needs: str) -> CompiledRule:
    needed, without, either = 0, 0, []
    for part in needs.split():
        if part.startswith("-"):
            without |= ALL[part[1:]]
        elif "|" in part:
            either.append(sum(ALL[name] for name in part.split("|")))
        else:
            needed |= ALL[part]
    return CompiledRule(1 << at, needed, tuple(either), without)


COMPILED_RULES = tuple(compile_rule(at, needs) for at, (_, _, needs) in enumerate(RULES))


class Demand(msgspec.Struct, frozen=True):
    """A text that scores above THRESHOLD: what weighs most in it, and its sentences."""

    score: int
    code: str
    where: str


def find_demand(text: str, place: Place = "description", topic: int = 0) -> Demand | None:
    """Return what the two neighbouring sentences that score most ask for; None: too little."""
    said = sentences(text)
    met = [rules_met(in_place(sentence_bits(one), place, topic)) for one in said]
    best = max(range(len(met)), key=lambda at: score_of(pair(met, at)), default=None)
    if best is None or (score := score_of(pair(met, best))) <= THRESHOLD:
        return None
    return Demand(score, code_of(pair(met, best)), " ".join(said[best : best + 2]))


def pair(met: list[int], at: int) -> int:
    return met[at] | met[at + 1] if at + 1 < len(met) else met[at]


def topic_of(names: Iterable[str], said: str = "") -> int:
    """Return what a thing is about, by its names and the first sentence that is said of it, unless
    that clearly asks for something itself."""
    topic = 0
    for name in names:
        topic |= sentence_bits(name) & TOPIC
    bits = sentence_bits(said)
    asks = score_of(rules_met(in_place(bits, "description", topic))) >= CLEAR
    return topic if asks else topic | bits & TOPIC


def in_place(bits: int, place: Place, topic: int) -> int:
    """Return the bits of a sentence with those of its context."""
    off = bits & ~topic
    if off & PRIVATE:
        bits |= ALL["mentioned"]
        if not bits & ALL["barred"] or bits & ALL["hide"]:
            bits |= ALL["private"]
    if off & ALL["ai"]:
        bits |= ALL["model"]
    if off & ACTIVITIES:
        bits |= ALL["elsewhere"]
    return bits | ALL.get(place, 0)


@lru_cache(maxsize=16_384)
def rules_met(bits: int) -> int:
    met = 0
    for rule in COMPILED_RULES:
        if bits & rule.needed == rule.needed and not bits & rule.without:
            if all(bits & one for one in rule.either):
                met |= rule.bit
    return met


@lru_cache(maxsize=16_384)
def score_of(met: int) -> int:
    return BASE + sum(weight for at, (weight, _, _) in enumerate(RULES) if met >> at & 1)


def code_of(met: int) -> str:
    """Return the name under which the rules that are met weigh most."""
    weights: dict[str, int] = {}
    for at, (weight, code, _) in enumerate(RULES):
        if code and met >> at & 1:
            weights[code] = weights.get(code, 0) + weight
    return max(weights, key=weights.__getitem__, default="instructs")


@lru_cache(maxsize=8_192)
def sentence_bits(sentence: str) -> int:
    folded = sentence.lower()
    said = ADDRESS.sub(" ", folded) if "//" in folded else folded
    bits = cues_of(ORDINARY.sub("", said))
    for name, regex in COMPILED.items():
        if any(sign in folded for sign in SIGNS[name]) and regex.search(sentence):
            bits |= ALL[name]
    return bits


def sentences(text: str) -> list[str]:
    return [one[:WIDEST] for one in SENTENCE_END.split(text, maxsplit=MAX_SENTENCES) if one]
