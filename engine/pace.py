"""How many prompt tokens a step may carry, as a time and not as a count.

Above: `scheduler.py` asks before it fills a step; `core.py` reports how long the step took. Below:
nothing. Knows neither tokens nor devices: it learns what a step costs from the steps.

A decode waits for the whole step, prompt chunks included. A chunk may therefore take what is left
of the target for the inter-token latency after the decodes' own time:

    tokens = (target - decode time) / time per prompt token

Both terms are running averages: the decode time of steps without prompts, by how many sequences
they decoded, and the rest of a mixed step per prompt token. Should the first be stale, the second
takes up the error, and the fixed point is still a step of exactly the target: with a decode time
of d and p a token, the rule leads to tokens = (target - d) / p whatever it believed of d.
"""

from __future__ import annotations

WEIGHT = 0.3
"""Of the newest step in the running averages."""
MIN_CHUNK = 16
"""Prompts always progress: at least so many tokens a step, whatever the target."""
MIN_OBSERVED = 16
"""Steps with fewer prompt tokens say nothing about the time of one."""
FIRST_CHUNK = 64
"""Beside decodes, before any step with a prompt was seen."""


class Pace:
    """Learns from `observe`, answers `prompt_tokens`. Not thread-safe."""

    def __init__(self, target_s: float | None) -> None:
        """target_s: the longest a step with decodes should take; None sets no limit."""
        assert target_s is None or target_s > 0, f"a step cannot take {target_s} s"
        self.target_s = target_s
        self._decode_s: dict[int, float] = {}
        """Seconds of a step without prompts, by the bit length of its number of decodes."""
        self._prompt_token_s: float | None = None

    def prompt_tokens(self, num_decodes: int, budget: int) -> int:
        """How many of `budget` tokens a step beside `num_decodes` decodes should spend on prompts;
        0 <= result <= budget."""
        if self.target_s is None or num_decodes == 0:
            return budget
        if self._prompt_token_s is None:
            return min(FIRST_CHUNK, budget)
        left_s = self.target_s - self._decode_time_s(num_decodes)
        return min(max(int(left_s / self._prompt_token_s), MIN_CHUNK), budget)

    def observe(self, num_decodes: int, num_prompt_tokens: int, step_s: float) -> None:
        """A step of so many decodes and prompt tokens took `step_s` seconds."""
        if num_prompt_tokens == 0:
            bucket = num_decodes.bit_length()
            self._decode_s[bucket] = _mixed(self._decode_s.get(bucket), step_s)
        elif num_prompt_tokens >= MIN_OBSERVED:
            # At least half the step is the prompt's: a stale decode time must not make it free.
            rest_s = max(step_s - self._decode_time_s(num_decodes), step_s / 2)
            self._prompt_token_s = _mixed(self._prompt_token_s, rest_s / num_prompt_tokens)

    def _decode_time_s(self, num_decodes: int) -> float:
        """Of the nearest smaller number of decodes that was seen; 0 when there is none."""
        wanted = num_decodes.bit_length() if num_decodes else 0
        known = [bucket for bucket in self._decode_s if bucket <= wanted]
        return self._decode_s[max(known)] if known and wanted else 0.0


def _mixed(average: float | None, newest: float) -> float:
    return newest if average is None else average + WEIGHT * (newest - average)
