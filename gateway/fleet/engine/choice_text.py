"""Reads one choice of a generation, from token ids to text, reasoning and calls: where it stops,
what counts and what is wasted.

Pure. The engine knows stop ids, not stop strings: what it generated behind one was not asked for,
so it is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import NamedTuple

import msgspec

from billing.cache_contracts import (
    DEFAULT_CONTRACT,
    NO_INPUT,
    Breakpoint,
    ContractName,
    InputSplit,
    split_input,
    split_kept,
)
from engine.protocol import EngineOutput, TokenLogprob, TokenLogprobs, Usage
from engine.text.detokenizer import Detokenizer, Piece
from engine.text.output_parser.parser import OutputParser
from engine.text.output_parser.reading.deltas import (
    ArgumentsDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallStart,
)
from engine.text.tokenizer import Tokenizer
from gateway.generate_request import ChatPrompt, OutputOptions
from gateway.generation_events import (
    CallDelta,
    FinishReason,
    Item,
    MeteredUsage,
    PromptLogprob,
    PromptReport,
    ReplicaEvent,
    TextDelta,
    TokenInfo,
    TokenTop,
)

UNLIKELY = -9999.0
"""OpenAI's word for a logprob too small to say; minus infinity is not JSON."""


class ChoiceText:
    num_reasoning = 0
    """Tokens of those used that are no answer."""

    def __init__(
        self,
        index: int,
        prompt: OutputOptions,
        tokenizer: Tokenizer,
        ends: Container[int] | None = None,
        shown_ids: Collection[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        """`ends`: the tokens that are no text where an answer stops; None: whichever does.
        `shown_ids`: special tokens that are text all the same. `before`: the tokens of the text
        that it goes on with."""
        self.index = index
        self._keep_stop = prompt.include_stop_str_in_output
        self._ends = ends
        self._tokenizer = tokenizer
        self._tokens_as_ids = prompt.return_tokens_as_token_ids
        self._unsaid_ids: list[int] | None = [] if prompt.return_token_ids else None
        """Used, and told with no delta yet; None: they are not asked for."""
        self.detokenizer = Detokenizer(
            tokenizer,
            prompt.stop,
            self._keep_stop,
            skip_special_tokens=prompt.skip_special_tokens,
            shown=shown_ids,
            before=before,
        )
        self.over = False
        self.num_used = 0
        """Tokens up to the stop, it included."""
        self.num_wasted = 0
        """Tokens behind it."""

    def read(self, output: EngineOutput) -> TextDelta | None:
        """Read an output. None: nothing to show."""
        num_ids = len(output.token_ids)
        if self.over:
            self.num_wasted += num_ids
            return None
        token_ids = output.token_ids
        if output.finish_reason == "stop" and not self._keep_stop and self._ends_with(token_ids):
            token_ids = token_ids[:-1]  # the last one is the EOS or a stop id
        piece = self.push(token_ids)
        text = piece.text
        reason: FinishReason | None = None
        if output.finish_reason in ("stop", "length"):
            text += self.detokenizer.flush()
            reason = "stop" if output.finish_reason == "stop" else "length"
        if piece.stopped or self.detokenizer.stopped:
            reason = "stop"
        self.over = reason is not None
        num_used = piece.num_tokens_used if piece.stopped else num_ids
        self.num_used += num_used
        self.num_wasted += num_ids - num_used
        infos = None
        if output.logprobs is not None:
            infos = self.to_infos(self.shown_logprobs(output.logprobs, piece.num_tokens_used))
        delta = self.show(text, infos, reason)
        if self._unsaid_ids is None:
            return delta
        self._unsaid_ids += output.token_ids[:num_used]
        return None if delta is None else self._with_ids(delta)

    def _with_ids(self, delta: TextDelta) -> TextDelta:
        told, self._unsaid_ids = self._unsaid_ids, []
        return msgspec.structs.replace(delta, token_ids=told)

    def shown_logprobs(self, logprobs: list[TokenLogprobs], num_shown: int) -> list[TokenLogprobs]:
        """Return the logprobs of the tokens whose text is shown."""
        return logprobs[:num_shown]

    def push(self, token_ids: list[int]) -> Piece:
        return self.detokenizer.push(token_ids)

    def show(
        self, text: str, logprobs: list[TokenInfo] | None, reason: FinishReason | None
    ) -> TextDelta | None:
        if not text and not logprobs and reason is None:
            return None
        return TextDelta(
            index=self.index,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_string=self.detokenizer.stop_string,
        )

    def _ends_with(self, token_ids: list[int]) -> bool:
        """The last one is the EOS or a stop id. It is, unless a grammar came to its own end."""
        return self._ends is None or token_ids[-1] in self._ends

    def to_infos(self, logprobs: list[TokenLogprobs]) -> list[TokenInfo]:
        return [self._to_info(entry) for entry in logprobs]

    def _to_info(self, entry: TokenLogprobs) -> TokenInfo:
        chosen = self.to_top(entry.chosen)
        return TokenInfo(
            token=chosen.token,
            logprob=chosen.logprob,
            bytes=chosen.bytes,
            top_logprobs=[self.to_top(top) for top in entry.top],
        )

    def to_top(self, entry: TokenLogprob) -> TokenTop:
        return to_top(entry, self._tokenizer, as_ids=self._tokens_as_ids)


def to_top(entry: TokenLogprob, tokenizer: Tokenizer, *, as_ids: bool) -> TokenTop:
    data = tokenizer.token_bytes(entry.token_id)
    return TokenTop(
        token=f"token_id:{entry.token_id}" if as_ids else data.decode(errors="replace"),
        logprob=max(entry.logprob, UNLIKELY),
        bytes=list(data),
    )


def to_prompt_logprobs(
    scores: Sequence[TokenLogprobs], most: int, tokenizer: Tokenizer
) -> list[dict[str, PromptLogprob] | None]:
    """Return what vLLM says of a prompt, with at most so many of the likeliest of each place."""
    found: list[dict[str, PromptLogprob] | None] = [None]
    for entry in scores:
        assert entry.rank is not None, "a prompt's"
        ranks = {entry.chosen.token_id: entry.rank}
        ranks |= {each.token_id: rank for rank, each in enumerate(entry.top, 1)}
        found.append(
            {
                str(each.token_id): PromptLogprob(
                    logprob=max(each.logprob, UNLIKELY),
                    rank=ranks[each.token_id],
                    decoded_token=tokenizer.token_bytes(each.token_id).decode(errors="replace"),
                )
                for each in (entry.chosen, *entry.top[:most])
            }
        )
    return found


class ChoiceParser(NamedTuple):
    """The way the text of each choice is read where it is more than an answer."""

    parser: Callable[[], OutputParser]
    """A fresh one."""
    shown_ids: Collection[int] = ()
    """Special tokens that it wants to see."""
    one_call: bool = False
    """An answer is over with its first call."""


class ParsedChoice(ChoiceText):
    """A choice that is read for calls and reasoning, token by token: what is thought, at the
    beginning, is counted with its markers."""

    def __init__(
        self,
        index: int,
        prompt: OutputOptions,
        tokenizer: Tokenizer,
        ends: Container[int] | None,
        parsing: ChoiceParser,
        before: Sequence[int] = (),
    ) -> None:
        super().__init__(index, prompt, tokenizer, ends, parsing.shown_ids, before)
        self._parser = parsing.parser()
        self._one_call = parsing.one_call
        self._deltas: list[Delta] = []
        """Not shown yet."""
        self._logprobs: list[TokenInfo] = []
        """Logprobs of tokens that have not produced visible text yet."""

    def push(self, token_ids: list[int]) -> Piece:
        """The text goes to the parser."""
        num_used, stopped = 0, False
        for token_id in token_ids:
            was_reasoning = self._parser.in_reasoning
            piece = self.detokenizer.push([token_id])
            num_used += piece.num_tokens_used
            self._deltas += self._parser.feed(piece.text)
            if was_reasoning:
                self.num_reasoning += piece.num_tokens_used
            elif self._parser.in_reasoning:  # with this one the marker is whole
                self.num_reasoning = self.num_used + num_used
            stopped = piece.stopped or (self._one_call and self._parser.ends_with_calls)
            if stopped:
                break
        return Piece("", stopped, num_used)

    def show(
        self, text: str, logprobs: list[TokenInfo] | None, reason: FinishReason | None
    ) -> TextDelta | None:
        """Logprobs wait for something to be shown with, so that a stream begins with what the
        answer begins with. `text`: the rest of it."""
        self._deltas += self._parser.feed(text)
        self._logprobs += logprobs or ()
        if reason is not None:
            self._deltas += self._parser.finish()
            if reason == "stop" and self._parser.ends_with_calls:
                reason = "tool_calls"
        elif not self._deltas:
            return None
        deltas, self._deltas = self._deltas, []
        held, self._logprobs = self._logprobs, []
        return TextDelta(
            index=self.index,
            text="".join(each.text for each in deltas if isinstance(each, ContentDelta)),
            reasoning="".join(each.text for each in deltas if isinstance(each, ReasoningDelta)),
            calls=to_calls(deltas),
            logprobs=None if logprobs is None else held,
            finish_reason=reason,
            stop_string=self.detokenizer.stop_string,
        )


def to_calls(deltas: Sequence[Delta]) -> tuple[CallDelta, ...]:
    """Return one delta of each call that something came of."""
    found: dict[int, CallDelta] = {}
    for each in deltas:
        match each:
            case ToolCallStart():
                found[each.index] = CallDelta(each.index, each.name)
            case ArgumentsDelta():
                call = found.get(each.index, CallDelta(each.index))
                found[each.index] = CallDelta(each.index, call.name, call.arguments + each.text)
    return tuple(found.values())


class PromptReports:
    """Tells what a client asked to be told of its prompts: their token ids with the first that is
    heard of each choice, their log-probabilities when the engine brings them."""

    def __init__(
        self, options: OutputOptions, prompts: Sequence[list[int]], n: int, tokenizer: Tokenizer
    ) -> None:
        self._tells_ids, self._most = bool(options.return_token_ids), options.prompt_logprobs
        self._prompts, self._n, self._tokenizer = prompts, n, tokenizer
        self._told: set[int] = set()
        self._scored: set[int] = set()
        """The prompts whose log-probabilities were told; an engine that goes on brings them again.
        """
        self.is_silent = not self._tells_ids and self._most is None

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def number_of(self, index: int) -> int:
        """Return the prompt of a choice."""
        return index // self._n

    def length_of(self, number: int) -> int:
        return len(self._prompts[number])

    def of(self, output: EngineOutput) -> Iterator[PromptReport]:
        number, index = self.number_of(output.index), output.index
        if self._tells_ids and index not in self._told:
            self._told.add(index)
            yield PromptReport(index=index, token_ids=self._prompts[number])
        is_scored = output.prompt_logprobs is not None and number not in self._scored
        if self._most is not None and output.prompt_logprobs is not None and is_scored:
            self._scored.add(number)
            told = to_prompt_logprobs(output.prompt_logprobs, self._most, self._tokenizer)
            for choice in range(number * self._n, (number + 1) * self._n):
                yield PromptReport(index=choice, logprobs=told)


class CountedBefore(NamedTuple):
    """Holds what was counted of a generation at the engines that were lost."""

    num_said: int
    """Tokens that they generated, of what was read."""
    begun: frozenset[int]
    """The prompts, by number, of which they said a token."""
    counted: InputSplit
    """How these are counted."""


class Choices:
    """The choices of one attempt, and its usage so far."""

    def __init__(
        self,
        choices: Sequence[ChoiceText],
        reports: PromptReports,
        contract: ContractName,
        breakpoints: Sequence[Breakpoint] = (),
    ) -> None:
        """`contract`: by which what the engine reused is counted; `breakpoints`: of an explicit
        one, those that the engine was told of."""
        self._choices, self._reports = choices, reports
        self._contract, self._breakpoints = contract, breakpoints
        self.usage: MeteredUsage | None = None
        self._num_open = len(choices)
        self._input: InputSplit | None = None
        self._input_of: tuple[object, ...] = ()
        self._before: CountedBefore | None = None
        """None: the first engine still writes."""
        self._heard: set[int] = set()
        """The prompts, by number, of which the engine that writes said a token."""
        self._num_cached = self._num_fresh = self._num_fresh_cached = 0
        """Tokens of those prompts: the cached ones; all and the cached ones of prompts that no
        engine had computed before."""

    @property
    def over(self) -> bool:
        """Tell whether every choice has its end, whether or not the engine knows."""
        return self._num_open == 0

    @property
    def ended(self) -> tuple[int, ...]:
        return tuple(choice.index for choice in self._choices if choice.over)

    def resume(self) -> None:
        """Note that another engine goes on. How a prompt is counted stays as the first one that
        computed it counted it; of what this one computes nothing is known yet."""
        num_said = sum(choice.num_used + choice.num_wasted for choice in self._choices)
        begun = self._heard if self._before is None else self._heard | self._before.begun
        counted = NO_INPUT if self._input is None else self._input
        self._before = CountedBefore(num_said, frozenset(begun), counted)
        self._heard, self.usage = set(), None
        self._num_cached = self._num_fresh = self._num_fresh_cached = 0

    def read(self, output: EngineOutput) -> ReplicaEvent:
        choice = self._choices[output.index]
        was_over = choice.over
        if len(self._heard) < self._reports.num_prompts and output.token_ids:
            self._hear(output)
        delta = choice.read(output)
        self._num_open -= choice.over and not was_over
        if output.usage.prefilled:
            self.usage = self._to_metered(output)
        items: tuple[Item, ...] = () if delta is None else (delta,)
        if not self._reports.is_silent:
            items = (*self._reports.of(output), *items)
        return ReplicaEvent(
            items=items,
            usage=self.usage,
            finished=output.finished,
            queue_time_s=output.usage.queue_time_s,
        )

    def last(self) -> ReplicaEvent:
        """Return the last event in place of the engine's own, which will not come."""
        return ReplicaEvent(usage=self.usage, finished=True)

    def _to_metered(self, output: EngineOutput) -> MeteredUsage:
        """Count what was seen here as it comes. What the engine generated and never sent, because
        the request was aborted, is the client's unless it has its whole answer already."""
        usage, used, wasted, reasoning = output.usage, 0, 0, 0
        for choice in self._choices:
            used += choice.num_used
            wasted += choice.num_wasted
            reasoning += choice.num_reasoning
        if output.finished:
            num_before = 0 if self._before is None else self._before.num_said
            unseen = num_before + usage.generated_tokens - used - wasted
            if self.over:
                wasted += unseen
            else:
                used += unseen
        counted, again, cached_again = self._split(usage), 0, 0
        if self._before is not None:
            cached_again = usage.cached_tokens - self._num_fresh_cached
            again = usage.input_tokens - self._num_fresh - cached_again
        return MeteredUsage(
            uncached_input=counted.uncached,
            cache_read=counted.cache_read,
            cache_write=counted.cache_write_5m,
            cache_write_1h=counted.cache_write_1h,
            output=used,
            reasoning_output=reasoning,
            wasted_output=wasted,
            recomputed_input=again,
            recomputed_cached=cached_again,
        )

    def _hear(self, output: EngineOutput) -> None:
        """Note of which prompt this is the first token, and whether that was computed before."""
        number, num_cached = self._reports.number_of(output.index), output.usage.cached_tokens
        if number in self._heard:
            return
        self._heard.add(number)
        if self._before is not None and number not in self._before.begun:
            length = self._reports.length_of(number)
            self._num_fresh += length
            self._num_fresh_cached += min(length, max(0, num_cached - self._num_cached))
        self._num_cached = num_cached

    def _split(self, usage: Usage) -> InputSplit:
        """Split the prompts, anew where what is known of them has changed, not at each token."""
        if self._before is not None:
            counted = self._before.counted
            if not self._num_fresh:
                return counted
            fresh = split_input(self._contract, self._num_fresh, self._num_fresh_cached)
            self._input = counted.plus(fresh)
            return self._input
        read = usage.prompt_tokens, usage.cached_tokens, usage.kept_tokens, usage.written_tokens
        if self._input is None or read != self._input_of:
            self._input, self._input_of = self._split_anew(usage), read
        return self._input

    def _split_anew(self, usage: Usage) -> InputSplit:
        if not self._breakpoints:
            return split_input(self._contract, usage.prompt_tokens, usage.cached_tokens)
        return split_kept(
            usage.prompt_tokens, usage.kept_tokens, usage.written_tokens, self._breakpoints
        )


class GenerationText(Choices):
    """The text that is generated in a conversation."""

    def __init__(
        self,
        prompt: ChatPrompt,
        n: int,
        tokenizer: Tokenizer,
        contract: ContractName = DEFAULT_CONTRACT,
        *,
        prompt_token_ids: list[int] | None = None,
        breakpoints: Sequence[Breakpoint] = (),
        ends: Container[int] | None = None,
        parsing: ChoiceParser | None = None,
    ) -> None:
        """`prompt_token_ids`: for who asks to be told of them, and for an answer that goes on with
        the last message. `ends`: see `ChoiceText`. `parsing`: None where all that is said is the
        answer."""
        told = prompt_token_ids or []
        before = told if prompt.continues else ()
        choices: list[ChoiceText]
        if parsing is None:
            choices = [ChoiceText(i, prompt, tokenizer, ends, before=before) for i in range(n)]
        else:
            choices = [ParsedChoice(i, prompt, tokenizer, ends, parsing, before) for i in range(n)]
        reports = PromptReports(prompt, [told], n, tokenizer)
        super().__init__(choices, reports, contract, breakpoints)
