"""Grouped-query self-attention over the paged cache (arXiv:2305.13245), heads cut over ranks.

Knows neither sequences nor blocks: the plan does.
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.attention.types import AttentionPlan, KVLayer
from engine.kernels.pointwise.rotary_cache import rotate_and_store
from engine.kernels.pointwise.types import QKNorm, QKVHeads, Rotation
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.parallel import ParallelGroup, own_shard, share
from engine.layers.weight_source import WeightSource


class Attention:
    """[T, hidden] -> [T, hidden]"""

    def __init__(
        self,
        source: WeightSource,
        name: str,
        *,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None,
        group: ParallelGroup,
    ) -> None:
        """qk_norm_eps: not None normalises queries and keys per head (Qwen3, arXiv:2505.09388)."""
        self._heads = QKVHeads(
            share(num_heads, group, "num_attention_heads"),
            share(num_kv_heads, group, "num_key_value_heads"),
            head_dim,
        )
        parts = (
            (f"{name}.q_proj", num_heads * head_dim),
            (f"{name}.k_proj", num_kv_heads * head_dim),
            (f"{name}.v_proj", num_kv_heads * head_dim),
        )
        self._qkv = ColumnParallelLinear(source, parts, hidden, bias=qkv_bias, group=group)
        self._output = RowParallelLinear(
            source, f"{name}.o_proj", num_heads * head_dim, hidden, bias=output_bias, group=group
        )
        self.kv_scales = source.kv_scales(name, num_kv_heads, own_shard(group))
        """For whoever allocates this layer's cache; None where the checkpoint has none."""
        self._norm: QKNorm | None = None
        if qk_norm_eps is not None:
            self._norm = QKNorm(
                source.take(f"{name}.q_norm.weight", (head_dim,)),
                source.take(f"{name}.k_norm.weight", (head_dim,)),
                qk_norm_eps,
            )

    def __call__(
        self, x: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVLayer
    ) -> Tensor:
        q = rotate_and_store(self._qkv(x), self._heads, self._norm, rotation, plan, cache)
        return self._output(plan.attend(q, cache))
