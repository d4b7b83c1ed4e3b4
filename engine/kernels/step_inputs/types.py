"""A step's inputs as the host sends them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepInputs(NamedTuple):
    """A step of S sequences and T tokens as the host sent it; integers are int32 but where said."""

    token_ids: Tensor
    """int64 [T]"""
    query_start: Tensor
    """[S + 1]: first token of each sequence, and their total."""
    seq_lens: Tensor
    """[S]: 0 for padding."""
    previous_rows: Tensor
    """[S]: the row of `drawn` that is the sequence's last token; negative: that is known."""
    table_rows: Tensor
    """[S]: the row of `kept` that is the sequence's."""
    first_changed: Tensor
    """[S]: where in the sequence's table the change begins."""
    num_changed: Tensor
    """[S]"""
    changes_at: Tensor
    """[S]: where in `changes` it stands."""
    changes: Tensor
    """[any]: block ids."""
