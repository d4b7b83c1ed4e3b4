"""Token ids to vectors and vectors to logits, both cut over the vocabulary.

Tied models build both from one tensor.
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.linear.dispatch import pack_linear
from engine.kernels.linear.weights import LinearWeight
from engine.kernels.pointwise.embedding import gather_rows
from engine.kernels.sampling.dispatch import combine_argmax, shard_argmax
from engine.layers.parallel import ParallelGroup, own_shard, share
from engine.layers.weight_source import WeightSource


class VocabParallelEmbedding:
    """int64 [T] -> [T, hidden]; each rank looks up the ids it holds and the ranks sum up."""

    def __init__(
        self, source: WeightSource, name: str, vocab_size: int, hidden: int, group: ParallelGroup
    ) -> None:
        self._group = group
        self._first = group.rank * share(vocab_size, group, "vocab_size")
        self.weight = source.take(f"{name}.weight", (vocab_size, hidden), own_shard(group))
        """[this rank's rows, hidden]"""

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return gather_rows(token_ids, self.weight)
        return self._group.all_reduce(gather_rows(token_ids, self.weight, self._first))


class ParallelLMHead:
    """[S, hidden] -> logits [S, vocab] on every rank."""

    def __init__(
        self, weight: LinearWeight, group: ParallelGroup, *, deterministic: bool = False
    ) -> None:
        """weight: this rank's rows [vocab / size, hidden], the embedding's own when tied.
        deterministic: see `WeightSource.deterministic`."""
        self._group = group
        self._product = pack_linear(weight, None, deterministic=deterministic)

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_gather(self._product(x))

    def most_likely(self, x: Tensor) -> Tensor:
        """[S, hidden] -> int64 [S] on every rank, the lowest of equals; -1 where the largest logit
        is not a finite number. Two numbers a row and rank are moved, not the vocabulary."""
        logits = self._product(x).contiguous()
        best, ids = shard_argmax(logits, self._group.rank * logits.shape[1])
        gathered = (self._group.all_gather(each[:, None]).t() for each in (best, ids))
        return combine_argmax(*gathered)
