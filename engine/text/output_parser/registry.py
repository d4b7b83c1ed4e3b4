"""The families of models by how they write calls and what they think, and which one a model is of.

Knows of a model its chat template and its vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from engine.text.output_parser.families import deepseek, hermes, json_calls, llama3, mistral
from engine.text.output_parser.reading.call_format import CallFormat
from engine.text.output_parser.reading.reader import Reader, Steps
from engine.text.output_parser.reasoning import MISTRAL_THINK, THINK, Reasoning

FamilyName: TypeAlias = Literal[
    "hermes", "llama3_json", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31", "json"
]
"""As vLLM calls its tool parsers, where it has them."""
ReasoningName: TypeAlias = Literal["think", "mistral", "none"]
"""`none`: whatever is between markers is content."""
HasToken: TypeAlias = Callable[[str], bool]
"""Whether a text is one token of a vocabulary."""


class Family(NamedTuple):
    read: Callable[[Reader], Steps[None]]
    writing: CallFormat
    markers: tuple[str, ...] = ()


FAMILIES: dict[FamilyName, Family] = {
    "hermes": Family(hermes.read, hermes.WRITING, hermes.MARKERS),
    "llama3_json": Family(llama3.read, llama3.WRITING, llama3.MARKERS),
    "mistral": Family(mistral.read, mistral.WRITING, mistral.MARKERS),
    "mistral_v11": Family(mistral.read, mistral.WRITING_V11, mistral.MARKERS),
    "deepseek_v3": Family(deepseek.read, deepseek.WRITING, deepseek.MARKERS),
    "deepseek_v31": Family(deepseek.read, deepseek.WRITING_V31, deepseek.MARKERS),
    "json": Family(json_calls.read, json_calls.WRITING),
}
REASONINGS: dict[ReasoningName, Reasoning | None] = {
    "think": THINK,
    "mistral": MISTRAL_THINK,
    "none": None,
}


def detect_family(template: str, has_token: HasToken) -> FamilyName:
    """By what the source of a chat template writes of earlier calls, then by the vocabulary."""
    if deepseek.OPENS in template:
        return "deepseek_v3" if deepseek.FENCE in template else "deepseek_v31"
    if mistral.OPENS in template:
        return "mistral_v11" if mistral.ARGS in template else "mistral"
    if hermes.OPENS in template and "<function=" not in template:  # Qwen 3 Coder's is no JSON
        return "hermes"
    if has_token(llama3.TAG):
        return "llama3_json"
    return "json"


def detect_reasoning(template: str) -> ReasoningName:
    if MISTRAL_THINK.opens in template:
        return "mistral"
    return "think" if THINK.closes in template else "none"
