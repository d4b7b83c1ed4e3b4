"""How many prompt tokens a step may carry, as a time and not as a count.

Knows neither tokens nor devices: it learns what a step costs from the steps.

A decode waits for the whole step, prompt chunks included. A chunk may therefore take what is left
of the target for the inter-token latency after the decodes' own time:

    tokens = (target - decode time) / time per prompt token

Both terms are running averages: the decode time of steps without prompts, by how many sequences
they decoded, and the rest of a mixed step per prompt token. Should the first be stale, the second
takes up the error, and the fixed point is still a step of exactly the target: with a decode time
of d and p a token, the rule leads to tokens = (target - d) / p whatever it believed of d.

A long prompt is there for hundreds of steps, so it is held to more than the target: beside decodes
it takes no longer than LONG_SHARE of what they take, that nobody's tokens come half as late again
because of it. What decodes take is then not a matter of belief: now and then a step goes without
long prompts, to measure it. What a token of a long prompt takes is learnt apart, for it grows with
all that came before it: a chunk is a time, be it of one token. Where even one takes longer (some
time is spent on a chunk whatever its size, as on reading its context), chunks of SPACED_CHUNK
tokens are spaced out: what one took too long, the decodes get back in steps without any. Then they
still take no more than LONG_SHARE longer on average, but some steps do.
"""

from __future__ import annotations

WEIGHT = 0.3
"""The weight of the newest step in the running averages."""
MIN_CHUNK = 16
"""Prompts always progress: at least so many tokens a step, whatever the target."""
MIN_OBSERVED = 16
"""Steps with fewer prompt tokens say nothing about the time of one."""
FIRST_CHUNK = 64
"""Beside decodes, before any step with a prompt was seen."""
LONG_SHARE = 0.4
"""The share of the decodes' time that long prompts may add to it. Half would be the limit; the rest
absorbs the variation between steps."""
SPACED_CHUNK = 32
"""Tokens, where none at all would be within the share: so many that what is spent whatever their
number is not most of it."""
MEASURE_EVERY = 32
"""Mixed steps between two attempts to see a step of decodes alone."""
MEASURE_TRIES = 2
"""Steps in a row that long prompts sit out for it; there may be short ones in them."""


class Pace:
    """Learns from `observe`, answers `prompt_tokens`. Not thread-safe."""

    def __init__(self, target_s: float | None) -> None:
        """target_s: the longest a step with decodes should take; None sets no limit."""
        assert target_s is None or target_s > 0, f"a step cannot take {target_s} s"
        self.target_s = target_s
        self._decode_s: dict[int, float] = {}
        """Seconds of a step without prompts, by the bit length of its number of decodes."""
        self._prompt_token_s: float | None = None
        self._short_token_s = 0.0
        """The same, where the decodes' time is known and not believed."""
        self._long_token_s: float | None = None
        """The time of a token of a long prompt."""
        self._is_spaced = False
        """A chunk of one token took too long, and one of SPACED_CHUNK still does."""
        self._owed_s = 0.0
        """By long prompts to the decodes."""
        self._num_mixed: dict[int, int] = {}
        """Steps with prompts since the last one without, by the same."""

    def prompt_tokens(self, num_decodes: int, budget: int) -> int:
        """How many of `budget` tokens a step beside `num_decodes` decodes should spend on prompts;
        0 <= result <= budget."""
        if self.target_s is None or num_decodes == 0:
            return budget
        if self._prompt_token_s is None:
            return min(FIRST_CHUNK, budget)
        left_s = self.target_s - self._decode_time_s(num_decodes)
        return min(max(int(left_s / self._prompt_token_s), MIN_CHUNK), budget)

    def long_prompt_tokens(self, num_decodes: int, budget: int) -> int:
        """The same for long prompts (`Sequence.is_long`), all of them together; 0 now and then."""
        most = self.prompt_tokens(num_decodes, budget)
        if self.target_s is None or num_decodes == 0:
            return most
        bucket = num_decodes.bit_length()
        num_mixed, decode_s = self._num_mixed.get(bucket, 0), self._decode_s.get(bucket)
        is_due = decode_s is None or num_mixed >= MEASURE_EVERY
        if is_due and num_mixed % MEASURE_EVERY < MEASURE_TRIES:
            return 0
        if decode_s is None or self._long_token_s is None:
            return min(MIN_CHUNK, most)
        share_s = LONG_SHARE * decode_s
        if self._owed_s >= share_s:
            return 0
        num_tokens = int(share_s / self._long_token_s)
        self._is_spaced = num_tokens < (SPACED_CHUNK if self._is_spaced else 1)
        return min(SPACED_CHUNK if self._is_spaced else num_tokens, most)

    def overlook(self, num_decodes: int) -> None:
        """There was a step whose time says nothing."""
        bucket = num_decodes.bit_length()
        self._num_mixed[bucket] = self._num_mixed.get(bucket, 0) + 1
        self._owe(num_decodes, 0.0)

    def observe(
        self, num_decodes: int, num_prompt_tokens: int, step_s: float, num_long_tokens: int = 0
    ) -> None:
        """A step of so many decodes and prompt tokens took `step_s` seconds. num_long_tokens: of
        them, those of long prompts."""
        bucket, decode_s = num_decodes.bit_length(), self._decode_time_s(num_decodes)
        long_s = 0.0
        if num_prompt_tokens == 0:
            self._decode_s[bucket] = _mixed(self._decode_s.get(bucket), step_s)
            self._num_mixed[bucket] = 0
        else:
            self._num_mixed[bucket] = self._num_mixed.get(bucket, 0) + 1
        if num_long_tokens:
            others = num_prompt_tokens - num_long_tokens
            others_s = others * self._short_token_s
            # A stale time of what is beside it must not make it free.
            long_s = max(step_s - decode_s - others_s, step_s / 10)
            self._long_token_s = _mixed(self._long_token_s, long_s / num_long_tokens)
        elif num_prompt_tokens >= MIN_OBSERVED:
            # At least half the step is the prompt's, for the same reason.
            rest_s = max(step_s - decode_s, step_s / 2)
            self._prompt_token_s = _mixed(self._prompt_token_s, rest_s / num_prompt_tokens)
            rest_s = max(step_s - decode_s, step_s / 10)
            self._short_token_s = _mixed(self._short_token_s or None, rest_s / num_prompt_tokens)
        self._owe(num_decodes, long_s)

    def _owe(self, num_decodes: int, long_s: float) -> None:
        """Long prompts took so long of a step."""
        decode_s = self._decode_s.get(num_decodes.bit_length())
        if num_decodes and decode_s is not None:
            self._owed_s = max(0.0, self._owed_s + long_s - LONG_SHARE * decode_s)

    def _decode_time_s(self, num_decodes: int) -> float:
        """Return the time of the nearest smaller number of decodes that was seen; 0 when there is
        none.
        """
        wanted = num_decodes.bit_length() if num_decodes else 0
        known = [bucket for bucket in self._decode_s if bucket <= wanted]
        return self._decode_s[max(known)] if known and wanted else 0.0


def _mixed(average: float | None, newest: float) -> float:
    return newest if average is None else average + WEIGHT * (newest - average)
