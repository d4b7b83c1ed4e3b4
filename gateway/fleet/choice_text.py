"""One choice of a generation, from token ids to text: where it stops, what counts and what is
wasted.

Above: `engine_replica`. Below: the engine's detokenizer. Pure. The engine knows stop ids, not
stop strings: what it generated behind one was not asked for, so it is counted apart.
"""

from __future__ import annotations

from collections.abc import Collection, Container

from billing.cache_contracts import DEFAULT_CONTRACT, ContractName, split_input
from engine.detokenizer import Detokenizer
from engine.protocol import EngineOutput, TokenLogprob, TokenLogprobs
from engine.tokenizer import Tokenizer
from gateway.fleet.replica import (
    FinishReason,
    MeteredUsage,
    ReplicaEvent,
    TextDelta,
    TokenInfo,
    TokenTop,
)
from gateway.wire.request import ChatPrompt

UNLIKELY = -9999.0
"""OpenAI's word for a logprob too small to say; minus infinity is not JSON."""


class ChoiceText:
    def __init__(
        self, index: int, prompt: ChatPrompt, tokenizer: Tokenizer, ends: Container[int] | None
    ) -> None:
        """`ends`: the tokens that are no text where an answer stops; None: whichever does."""
        self._index = index
        self._keep_stop = prompt.include_stop_str_in_output
        self._ends = ends
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt.stop, self._keep_stop)
        self.over = False
        self.num_used = 0
        """Tokens up to the stop, it included."""
        self.num_wasted = 0
        """Tokens behind it."""

    def read(self, output: EngineOutput) -> TextDelta | None:
        """None: nothing to show."""
        num_ids = len(output.token_ids)
        if self.over:
            self.num_wasted += num_ids
            return None
        shown = output.token_ids
        if output.finish_reason == "stop" and not self._keep_stop and self._ends_with(shown):
            shown = shown[:-1]  # the last one is the EOS or a stop id
        piece = self._detokenizer.push(shown)
        text = piece.text
        reason: FinishReason | None = None
        if output.finish_reason in ("stop", "length"):
            text += self._detokenizer.flush()
            reason = "stop" if output.finish_reason == "stop" else "length"
        if self._detokenizer.stopped:
            reason = "stop"
        self.over = reason is not None
        num_used = piece.num_tokens_used if piece.stopped else num_ids
        self.num_used += num_used
        self.num_wasted += num_ids - num_used
        logprobs = self._to_infos(output.logprobs, piece.num_tokens_used)
        if not text and not logprobs and reason is None:
            return None
        return TextDelta(index=self._index, text=text, logprobs=logprobs, finish_reason=reason)

    def _ends_with(self, token_ids: list[int]) -> bool:
        """The last one is the EOS or a stop id. It is, unless a grammar came to its own end."""
        return self._ends is None or token_ids[-1] in self._ends

    def _to_infos(
        self, logprobs: list[TokenLogprobs] | None, num_shown: int
    ) -> list[TokenInfo] | None:
        if logprobs is None:
            return None
        return [self._to_info(entry) for entry in logprobs[:num_shown]]

    def _to_info(self, entry: TokenLogprobs) -> TokenInfo:
        chosen = self._to_top(entry.chosen)
        return TokenInfo(
            token=chosen.token,
            logprob=chosen.logprob,
            bytes=chosen.bytes,
            top_logprobs=[self._to_top(top) for top in entry.top],
        )

    def _to_top(self, entry: TokenLogprob) -> TokenTop:
        data = self._tokenizer.token_bytes(entry.token_id)
        return TokenTop(
            token=data.decode(errors="replace"),
            logprob=max(entry.logprob, UNLIKELY),
            bytes=list(data),
        )


class GenerationText:
    """All choices of one attempt, and its usage so far."""

    def __init__(
        self,
        prompt: ChatPrompt,
        n: int,
        tokenizer: Tokenizer,
        contract: ContractName = DEFAULT_CONTRACT,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """`contract`: by which what the engine reused is counted. `eos_token_ids`: wanted where the
        answer has a form, which may be complete without any of them."""
        self._contract = contract
        ends = None if prompt.form is None else {*eos_token_ids, *prompt.stop_token_ids}
        self._choices = [ChoiceText(index, prompt, tokenizer, ends) for index in range(n)]
        self.usage: MeteredUsage | None = None

    @property
    def over(self) -> bool:
        """Every choice has its end, whether or not the engine knows."""
        return all(choice.over for choice in self._choices)

    def read(self, output: EngineOutput) -> ReplicaEvent:
        delta = self._choices[output.index].read(output)
        if output.usage.prefilled:
            self.usage = self._to_metered(output)
        return ReplicaEvent(
            items=() if delta is None else (delta,),
            usage=self.usage,
            finished=output.finished,
            queue_time_s=output.usage.queue_time_s,
        )

    def last(self) -> ReplicaEvent:
        """In place of the engine's own, which will not come."""
        return ReplicaEvent(usage=self.usage, finished=True)

    def _to_metered(self, output: EngineOutput) -> MeteredUsage:
        """What was seen here counts as it comes. What the engine generated and never sent, because
        the request was aborted, is the client's unless it has its whole answer already."""
        told = output.usage
        used = sum(choice.num_used for choice in self._choices)
        wasted = sum(choice.num_wasted for choice in self._choices)
        if output.finished:
            unseen = told.generated_tokens - used - wasted
            if self.over:
                wasted += unseen
            else:
                used += unseen
        counted = split_input(self._contract, told.prompt_tokens, told.cached_tokens)
        return MeteredUsage(
            uncached_input=counted.uncached,
            cache_read=counted.cache_read,
            cache_write=counted.cache_write_5m,
            cache_write_1h=counted.cache_write_1h,
            output=used,
            wasted_output=wasted,
        )
