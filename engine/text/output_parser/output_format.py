"""How one model writes what it says: what parses its outputs, and what an output has to be that
must call.

Knows no tensor and no wire format.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from engine.protocol import Grammar
from engine.text.output_parser.grammars.forced_calls import Tool, forced_calls
from engine.text.output_parser.grammars.lark import Lark, grammar_rule, is_matched_as_token
from engine.text.output_parser.grammars.offered_calls import (
    answer_or_calls,
    marker_of,
    text_and_calls,
)
from engine.text.output_parser.parser import OutputParser
from engine.text.output_parser.reading.reader import MAX_CALLS
from engine.text.output_parser.reasoning import ReasoningState
from engine.text.output_parser.registry import (
    FAMILIES,
    REASONINGS,
    FamilyName,
    ReasoningName,
    detect_family,
    detect_reasoning,
)

if TYPE_CHECKING:  # else whoever names a family in its settings would load a tokenizer
    from engine.text.tokenizer import Tokenizer

NEW_LINES = r"/\n{0,2}/"
"""Between reasoning and what follows it."""


class OutputFormat:
    """`template`: the source of the model's chat template, by which its family is told, unless it
    is named."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        family: FamilyName | None = None,
        reasoning: ReasoningName | None = None,
    ) -> None:
        def has_token(text: str) -> bool:
            return tokenizer.token_to_id(text) is not None

        self.family: FamilyName = family or detect_family(template, has_token)
        self.reasoning: ReasoningName = reasoning or detect_reasoning(template)
        self._family = FAMILIES[self.family]
        self._reasoning = REASONINGS[self.reasoning]
        markers = [*self._family.markers]
        if self._reasoning is not None:
            markers += [self._reasoning.opens, self._reasoning.closes]
        ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
        added = {
            marker: i for marker, i in ids.items() if i is not None and i in tokenizer.added_ids
        }
        self.shown_ids = frozenset(added.values()) & tokenizer.special_ids
        """Markers that a detokenizer leaves out, unless it is told to show them."""
        self._lark = Lark(
            {
                marker: i
                for marker, i in added.items()
                if is_matched_as_token(marker, special=i in tokenizer.special_ids)
            }
        )

    def reasoning_state(self, prompt: str) -> ReasoningState:
        """Return the reasoning state of a rendered prompt."""
        return "unsaid" if self._reasoning is None else self._reasoning.state(prompt)

    def parser(
        self,
        *,
        tools: Collection[str] = (),
        max_calls: int = MAX_CALLS,
        reasoning_state: ReasoningState = "unsaid",
    ) -> OutputParser:
        """For one choice. `tools`: the names of those that may be called; without any, what looks
        like a call is content."""
        return OutputParser(
            self._family.read if tools else None,
            tools=tools,
            max_calls=max_calls,
            reasoning=self._reasoning,
            reasoning_state=reasoning_state,
        )

    def forced(
        self,
        tools: Sequence[Tool],
        *,
        max_calls: int = MAX_CALLS,
        reasoning_state: ReasoningState = "unsaid",
    ) -> Grammar:
        """Return the grammar of an output that has to call: one of `tools`, which are not none, or
        several of them. Reasoning may come first and is free.
        """
        assert tools
        rules = forced_calls(self._family.writing, self._lark, tools, max_calls=max_calls)
        return self._behind_reasoning("calls", rules, reasoning_state)

    @property
    def marks_calls(self) -> bool:
        """Whether a call begins with something that no answer begins with."""
        return marker_of(self._family.writing, self._family.markers) is not None

    def offered(
        self,
        tools: Sequence[Tool],
        answer: Grammar | None = None,
        *,
        max_calls: int = MAX_CALLS,
        reasoning_state: ReasoningState = "unsaid",
    ) -> Grammar:
        """Return the grammar of an output that may call: `tools`, which are not none, or answer
        with one of `answer`, where `marks_calls`, or, without that, with any text around the calls.
        Raises as `answering`.
        """
        assert tools and (answer is None or self.marks_calls)
        writing, lark = self._family.writing, self._lark
        if answer is not None:
            rules = answer_or_calls(answer, writing, lark, tools, max_calls=max_calls)
        else:
            markers = self._family.markers
            rules = text_and_calls(writing, markers, lark, tools, max_calls=max_calls)
        return self._behind_reasoning("offer", rules, reasoning_state)

    def answering(self, grammar: Grammar, *, reasoning_state: ReasoningState) -> Grammar:
        """Return the grammar of an output whose answer is one of `grammar`; reasoning may come
        before it. Raises msgspec.DecodeError where a schema or a choice is no JSON.
        """
        if self._reasoning is None or reasoning_state == "closed":
            return grammar
        return self._behind_reasoning(
            "answer", [f"answer: {grammar_rule(grammar)}"], reasoning_state
        )

    def _behind_reasoning(
        self, start: str, rules: list[str], reasoning_state: ReasoningState
    ) -> Grammar:
        """Allow reasoning before it, also where nothing says whether there is some."""
        reasoning = self._reasoning
        if reasoning is not None and reasoning_state != "closed":
            opens = [] if reasoning_state == "open" else [self._lark.text(reasoning.opens)]
            rules = [
                f"thought: {' '.join([*opens, 'thinking', NEW_LINES])}",
                *self._lark.up_to("thinking", reasoning.closes),
                *rules,
            ]
            start = f"thought{'' if reasoning_state == 'open' else '?'} {start}"
        return Grammar(kind="lark", text="\n".join([f"start: {start}", *rules]))
