"""Reads what an attempt at plain completions says: text behind each prompt, and the prompt itself
where it is to be said again.

Pure.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from billing.cache_contracts import ContractName
from engine.protocol import EngineOutput, TokenLogprob, TokenLogprobs
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.choice_text import Choices, ChoiceText, PromptReports
from gateway.generate_request import CompletionPrompt
from gateway.generation_events import Item, PromptEcho, ReplicaEvent, TextDelta


class PlainChoice(ChoiceText):
    """A choice whose log-probabilities are of all that was generated: the token that ends it is
    one."""

    def shown_logprobs(self, logprobs: list[TokenLogprobs], num_shown: int) -> list[TokenLogprobs]:
        return logprobs[:num_shown] if self.detokenizer.stopped else logprobs


class EmptyCompletionText(ChoiceText):
    """The text where no token was asked for. An engine says one all the same: the house's."""

    def read(self, output: EngineOutput) -> TextDelta | None:
        self.num_wasted += len(output.token_ids)
        if self.over:
            return None
        self.over = True
        delta = TextDelta(index=self.index, text="", finish_reason="length")
        return delta if self._unsaid_ids is None else self._with_ids(delta)


class CompletionText(Choices):
    """The choices of one attempt. With `echo` each begins with its prompt; what the engine tells of
    that comes with the first choice of a prompt, for which the others wait."""

    def __init__(
        self,
        prompt: CompletionPrompt,
        prompts: Sequence[list[int]],
        n: int,
        tokenizer: Tokenizer,
        contract: ContractName,
        ends: Container[int] | None = None,
    ) -> None:
        """`prompts`: the same as token ids. `ends`: see `ChoiceText`."""
        kind: type[ChoiceText] = EmptyCompletionText if prompt.max_tokens == 0 else PlainChoice
        choices = [
            kind(i, prompt, tokenizer, ends, before=prompts[i // n])
            for i in range(n * len(prompts))
        ]
        super().__init__(choices, PromptReports(prompt, prompts, n, tokenizer), contract)
        self._prompt, self._prompts, self._n = prompt, prompts, n
        self._tokenizer = tokenizer
        self._echoes: dict[int, PromptEcho] = {}
        """By prompt, once it is known; its index is any."""
        self._held: dict[int, list[Item]] = {}
        """By prompt: of choices whose echo is not known yet."""
        self._echoed: set[int] = set()

    def read(self, output: EngineOutput) -> ReplicaEvent:
        event = super().read(output)
        if not self._prompt.echo:
            return event
        number = output.index // self._n
        if number not in self._echoes and (
            self._prompt.logprobs is None or output.prompt_logprobs is not None
        ):
            self._echoes[number] = self._echo_of(number, output.prompt_logprobs)
        items = [*self._held.pop(number, []), *event.items]
        if number in self._echoes:
            return msgspec.structs.replace(event, items=tuple(self._with_echoes(number, items)))
        self._held[number] = items
        return msgspec.structs.replace(event, items=())

    def _with_echoes(self, number: int, items: Sequence[Item]) -> list[Item]:
        found: list[Item] = []
        for item in items:
            if isinstance(item, TextDelta) and item.index not in self._echoed:
                self._echoed.add(item.index)
                found.append(msgspec.structs.replace(self._echoes[number], index=item.index))
            found.append(item)
        return found

    def _echo_of(self, number: int, logprobs: list[TokenLogprobs] | None) -> PromptEcho:
        written, ids = self._prompt.prompts[number], self._prompts[number]
        text = written if isinstance(written, str) else self._tokenizer.decode(ids, False)
        first = self._choices[number * self._n]
        return PromptEcho(
            index=number,
            text=text,
            first=first.to_top(TokenLogprob(ids[0], 0.0)),
            logprobs=None if logprobs is None else first.to_infos(self._cut(logprobs)),
        )

    def _cut(self, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Leave out the likeliest that only `prompt_logprobs` asks for."""
        most = self._prompt.logprobs
        return [TokenLogprobs(each.chosen, each.top[:most]) for each in logprobs]
