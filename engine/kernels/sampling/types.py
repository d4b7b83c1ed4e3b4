"""The parameters of a draw as tensors of rows, and the log-probabilities that it may give."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

GREEDY_TEMPERATURE = 1e-5
"""Below it the most likely token is taken, as for 0."""
MAX_VOCAB = 1 << 20
"""So that a sum of weights fits in 63 bits."""


class LogitAdjustments(NamedTuple):
    """The changes that rows make to their logits before anything is drawn. S rows, V tokens in the
    vocabulary.
    """

    repetition: Tensor
    """float32 [S]; 1 is none."""
    frequency: Tensor
    """float32 [S]; 0 is none. As presence."""
    presence: Tensor
    history: Tensor
    """int32 [S, any]: prompt and output of the rows that have a penalty."""
    lengths: Tensor
    """int32 [S]: of prompt and output; prompt_lengths: of the prompt."""
    prompt_lengths: Tensor
    bias_ids: Tensor
    """int32 [S, any], the first num_bias [S] of a row count; no id twice in a row. bias_values
    float32, alike."""
    bias_values: Tensor
    num_bias: Tensor
    stop_ids: Tensor
    """int32 [S, any], the first num_stop [S] of a row count: forbidden while the output is shorter
    than min_tokens, int32 [S]."""
    num_stop: Tensor
    min_tokens: Tensor
    allowed: Tensor | None
    """int32 [S, V / 32 rounded up], a bit for each token, from the lowest of the first word on.
    None: no row has a grammar."""
    counts: Tensor
    """int32 [>= S, V], all zero, and zero again afterwards: scratch."""
    adjusted: Tensor
    """float32 [>= S, V]: where the adjusted logits go."""


class SamplingTensors(NamedTuple):
    """The parameters of S rows, on their device. Persistent where steps are replayed as graphs."""

    temperature: Tensor
    """float32 [S]"""
    log_min_p: Tensor
    """float32 [S]: -inf is off."""
    top_k: Tensor
    """int32 [S]: 0, or the size of the vocabulary and more, is off."""
    top_p: Tensor
    """float64 [S]: 1 is off."""
    seeds: Tensor
    """int64 [S], the bits of an unsigned number"""
    positions: Tensor
    """int64 [S]: tokens drawn before"""
    adjustments: LogitAdjustments | None
    """None: no row of this batch asks for any."""


class RowLogprobs(NamedTuple):
    """The log probabilities of the raw logits. Column 0 is the token drawn, then the most likely
    ones, best first; in rows that asked for fewer the rest is undefined.
    """

    ids: Tensor
    """int32 [S, 1 + k]"""
    values: Tensor
    """float32 [S, 1 + k]"""
