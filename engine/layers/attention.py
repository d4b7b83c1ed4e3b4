"""Grouped-query self-attention over the paged cache (arXiv:2305.13245), heads cut over ranks.

Above: decoder. Below: linear, norm, rotary, `kernels/paged_attention.py`. Knows neither sequences
nor blocks: the plan does.
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.paged_attention import AttentionPlan, KVLayer
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.norm import RMSNorm
from engine.layers.parallel import ParallelGroup, share
from engine.layers.rotary import Rotation, rotate
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
        self._num_heads = share(num_heads, group, "num_attention_heads")
        self._num_kv_heads = share(num_kv_heads, group, "num_key_value_heads")
        self._head_dim = head_dim
        parts = (
            (f"{name}.q_proj", num_heads * head_dim),
            (f"{name}.k_proj", num_kv_heads * head_dim),
            (f"{name}.v_proj", num_kv_heads * head_dim),
        )
        self._qkv = ColumnParallelLinear(source, parts, hidden, bias=qkv_bias, group=group)
        self._output = RowParallelLinear(
            source, f"{name}.o_proj", num_heads * head_dim, hidden, bias=output_bias, group=group
        )
        self._qk_norms: tuple[RMSNorm, RMSNorm] | None = None
        if qk_norm_eps is not None:
            self._qk_norms = (
                RMSNorm(source, f"{name}.q_norm", head_dim, qk_norm_eps),
                RMSNorm(source, f"{name}.k_norm", head_dim, qk_norm_eps),
            )

    def __call__(
        self, x: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVLayer
    ) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        # Queries and keys lie side by side, so one rotation turns both.
        num_qk = self._num_heads + self._num_kv_heads
        turned = rotate(self._normalise(heads[:, :num_qk]), rotation)
        plan.write(turned[:, self._num_heads :], heads[:, num_qk:], cache)
        return self._output(plan.attend(turned[:, : self._num_heads], cache))

    def _normalise(self, qk: Tensor) -> Tensor:
        if self._qk_norms is None:
            return qk
        q_norm, k_norm = self._qk_norms
        normed = qk.new_empty(qk.shape)
        normed[:, : self._num_heads] = q_norm(qk[:, : self._num_heads])
        normed[:, self._num_heads :] = k_norm(qk[:, self._num_heads :])
        return normed
