"""The Llama network that penny is trained with, in plain torch, under Hugging Face's weight names.

It knows no text and no training loop; the engine has its own, faster network and never imports this
one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLAIN_ATTENTION = 768
EMBEDDING_STD = 0.1


@dataclass(frozen=True)
class Shape:
    """The sizes of the network, in Hugging Face's words."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    """Root mean square layer normalization (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)
        return normed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864), halves paired as in Llama.

    `x` is [batch, heads, length, head_dim]; `cos` and `sin` are [length, head_dim / 2].
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention over [batch, heads, length, head_dim], each position seeing those before.

    Below `PLAIN_ATTENTION` positions three plain matrix products in bf16 are up to three times
    as fast on a CPU as torch's fused kernel; above it their score matrix would be too large.
    """
    length = q.shape[-2]
    if length > PLAIN_ATTENTION or q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    future = torch.full((length, length), float("-inf"), dtype=scores.dtype).triu(1)
    return (scores + future).softmax(-1, dtype=scores.dtype) @ v


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        attended = causal_attention(q, k, v)
        mixed: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return fed


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Llama(nn.Module):
    """The whole network; input and output embeddings are one matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.apply(self._initialize)
        plant_induction(self)

    def _initialize(self, module: nn.Module) -> None:
        """Normal; the projections back into the residual stream are scaled by depth."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Layer):
            for projection in (module.self_attn.o_proj, module.mlp.down_proj):
                nn.init.normal_(
                    projection.weight, std=0.02 / (2 * self.shape.num_hidden_layers) ** 0.5
                )

    def hidden(self, token_ids: Tensor) -> Tensor:
        """Token ids [batch, length] to normed hidden states [batch, length, hidden]."""
        half = self.shape.head_dim // 2
        device = token_ids.device
        frequencies = self.shape.rope_theta ** -(torch.arange(half, device=device) / half)
        angles = torch.arange(token_ids.shape[1], device=device)[:, None] * frequencies
        x: Tensor = self.embed_tokens(token_ids)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


@torch.no_grad()
def plant_induction(network: Llama) -> None:
    """Begin with an induction circuit (arXiv:2209.11895) in the first two layers.

    One head per group of layer 0 attends to the position before and writes that token down; one of
    layer 1 looks for the place where the present token was written down, and copies what stands
    there. Such heads form in any language model that copies, but late; an hour on two cores is too
    short to wait for it. Everything stays trainable.
    """
    shape = network.shape
    size, half = shape.head_dim, shape.head_dim // 2
    frequencies = shape.rope_theta ** -(torch.arange(half) / half)
    fast = torch.arange(8)  # turn so much from one position to the next that the peak is sharp
    slow = torch.arange(18, half)  # turn so little that a match counts however far away it is
    slow = torch.cat((slow, slow + half))
    asked, written, copied = (
        torch.linalg.qr(torch.randn(shape.hidden_size, shape.hidden_size)).Q.clone()
        for _ in range(3)
    )
    for basis in (asked, written, copied):
        basis[:, 0] = 0  # dimension 0 is the same for all tokens: what position-only heads read
    network.embed_tokens.weight[:, 0] = 4 * EMBEDDING_STD
    first, second = network.layers[0], network.layers[1]
    assert isinstance(first, Layer) and isinstance(second, Layer)
    before, match = first.self_attn, second.self_attn
    for group in range(shape.num_key_value_heads):
        head = group * (shape.num_attention_heads // shape.num_key_value_heads)
        rows = slice(group * size, (group + 1) * size)
        columns = slice(head * size, (head + 1) * size)
        before.q_proj.weight[head * size + fast, 0] = 1.6
        before.k_proj.weight[group * size + fast, 0] = 1.6 * frequencies[fast].cos()
        before.k_proj.weight[group * size + half + fast, 0] = 1.6 * frequencies[fast].sin()
        before.v_proj.weight[rows] = asked[rows]
        before.o_proj.weight[:, columns] = 0.15 * written[rows].T
        match.q_proj.weight[head * size + slow] = 2.5 * asked[group * size + slow]
        match.k_proj.weight[group * size + slow] = 2.5 * written[group * size + slow]
        match.v_proj.weight[rows] = copied[rows]
        match.o_proj.weight[:, columns] = 1.5 * copied[rows].T
