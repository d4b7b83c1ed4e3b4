"""The least time a step can take on a device, from the operations and the bytes it cannot avoid.

Knows no kernel.

A step is a handful of phases (the layers' products, the head's, attention) that depend on one
another. Each takes at least the larger of two times: its bytes over the memory's rate and its
operations over the matrix units' rate; a step takes at least their sum. Left out because they are
parts in a hundred: activations, norms, the embedding's rows, logits, what is written to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roofline:
    """The best that a device does; measured, or as below."""

    bytes_per_s: float
    """A large copy within the device, bytes read and bytes written."""
    bf16_flops: float
    """Operations a second of a large product on random data."""
    fp8_flops: float


H200 = Roofline(bytes_per_s=4.3e12, bf16_flops=790e12, fp8_flops=1420e12)
"""Measured on one; but float8 is taken to be 1.8 times bfloat16 until it is measured, too."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense model that count here."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of all layers: queries and output, keys and values, gate, up and
        down.
        """
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    def kv_bytes(self, tokens: int, bytes_per_number: int) -> int:
        """Keys and values of so many tokens in all layers."""
        row = 2 * self.num_kv_heads * self.head_dim * bytes_per_number
        return tokens * self.num_layers * row


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a number: of the layers' weights, and of stored keys and values. The head's stay in
    bfloat16; products of 1-byte weights run at the rate of float8."""

    weights: int = 2
    kv: int = 2


BF16 = Precision()
FP8 = Precision(weights=1, kv=1)


def decode_step_s(
    roofline: Roofline, shape: Shape, batch: int, context: int, precision: Precision = BF16
) -> float:
    """One token for each of `batch` sequences of `context` tokens: all weights are read once, and
    every key and value."""
    kv = batch * shape.kv_bytes(context, precision.kv)
    return _products_s(roofline, shape, batch, batch, precision) + kv / roofline.bytes_per_s


def prefill_s(roofline: Roofline, shape: Shape, tokens: int, precision: Precision = BF16) -> float:
    """A prompt of `tokens` in one go, and its first token. Attention runs in bfloat16: it is
    arithmetic (each key is read for many queries), of which half is cut off by causality."""
    attention = causal_attention_flops(shape, tokens) * shape.num_layers / roofline.bf16_flops
    return _products_s(roofline, shape, tokens, 1, precision) + attention


def mixed_s_per_token(
    roofline: Roofline, shape: Shape, prompt: int, output: int, precision: Precision = FP8
) -> float:
    """Return the seconds of each token said, in a batch so large that the weights' bytes are shared
    by enough tokens: the products of its share of the prompt and of its own, and the keys and
    values of what is before it. The batch that the memory holds is that large.
    """
    products = _product_flops_s(roofline, shape.layer_parameters, prompt + output, precision)
    head = 2 * shape.head_parameters * output / roofline.bf16_flops
    attention = causal_attention_flops(shape, prompt) * shape.num_layers / roofline.bf16_flops
    contexts = output * prompt + output * (output + 1) // 2
    # Each key and value is written once, too.
    moved = shape.kv_bytes(contexts + prompt + output, precision.kv)
    return (products + head + attention + moved / roofline.bytes_per_s) / output


def causal_attention_flops(shape: Shape, tokens: int) -> int:
    """Return the operations of one layer and a prompt with nothing before it: a product and a sum
    for each channel of each (head, query, key at or before it), for scores and for values.
    """
    return 4 * shape.num_heads * shape.head_dim * (tokens * (tokens + 1) // 2)


def _products_s(
    roofline: Roofline, shape: Shape, tokens: int, sampled: int, precision: Precision
) -> float:
    """The layers' products of `tokens`, then the head's of `sampled`."""
    read = shape.layer_parameters * precision.weights / roofline.bytes_per_s
    layers = max(read, _product_flops_s(roofline, shape.layer_parameters, tokens, precision))
    head_read = 2 * shape.head_parameters / roofline.bytes_per_s
    return layers + max(head_read, 2 * shape.head_parameters * sampled / roofline.bf16_flops)


def _product_flops_s(
    roofline: Roofline, parameters: int, tokens: int, precision: Precision
) -> float:
    rate = roofline.fp8_flops if precision.weights == 1 else roofline.bf16_flops
    return 2 * parameters * tokens / rate
