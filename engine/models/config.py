"""From a checkpoint's config.json to the shape of a decoder.

Knows no files: the parsed JSON is handed in. Both the form of transformers 4 (`rope_theta`,
`rope_scaling`, `torch_dtype`) and that of 5 (`rope_parameters`, `dtype`) are read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.config import Pooling
from engine.errors import ConfigError, UnsupportedModel
from engine.layers.rotary import RopeScaling
from engine.models.rope import read_rope

DtypeName = Literal["float32", "bfloat16", "float16"]


class EmbeddingHead(msgspec.Struct, frozen=True, kw_only=True):
    """The steps from the hidden states behind the final norm to the embedding of a prompt."""

    pooling: Pooling = "last"
    normalise: bool = True
    """To unit length."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of the feed-forward layer."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """The intermediate size of one expert."""
    normalise: bool
    """The weights of a token's experts sum to 1."""
    layers: tuple[bool, ...]
    """One a layer: whether it has experts."""
    names: tuple[str, str, str, str]
    """The block's in a layer; and gate, up and down of an expert in the block."""


class EncoderTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The traits of a model that reads a text whole and writes none."""

    num_layers: int
    layer_norm_eps: float
    type_vocab_size: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `Decoder`, or `Encoder`, needs to know."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    """The longest text in tokens, scaled rotation included."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """One a layer with a KV cache: tokens a query sees, itself included; None is all before it."""
    dtype: DtypeName | None
    """The dtype that the checkpoint names."""
    eos_token_ids: tuple[int, ...]
    experts: Experts | None = None
    rotary_dim: int
    """Channels of a head that are rotated: the first ones of the checkpoint."""
    fused_projections: bool = False
    """Queries, keys and values of a layer are stored as one tensor, and so are gate and up."""
    quantization: dict[str, Any] | None = None
    """The checkpoint's quantization_config, which `weights/quantization.py` reads."""
    generates: bool = True
    """False: without a head there are no logits."""
    embedding: EmbeddingHead = EmbeddingHead()
    encoder: EncoderTraits | None = None
    """None: a decoder."""

    @property
    def num_layers(self) -> int:
        """Those with a KV cache."""
        return len(self.windows)

    @property
    def depth(self) -> int:
        return self.num_layers if self.encoder is None else self.encoder.num_layers

    @property
    def sliding_window(self) -> int | None:
        """Tokens that any layer may still look at; None when a layer looks at all."""
        if not self.windows:
            return None
        widest = 0
        for window in self.windows:
            if window is None:
                return None
            widest = max(widest, window)
        return widest


MAX_LAYERS = 4096
"""Far more than any model has: a list of so many is made before a weight is looked at."""


class HFConfig(msgspec.Struct, kw_only=True):
    """The fields of config.json that the families read; others describe training."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: Annotated[int, Meta(le=MAX_LAYERS)]
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None | UnsetType = UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []
    is_causal: bool = True
    layer_norm_eps: float = 1e-12
    type_vocab_size: int = 2
    position_embedding_type: str = "absolute"


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The points in which a family differs from plain Llama."""

    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_projections: bool = False
    rotates_part: bool = False
    """Whether `partial_rotary_factor` may leave some of a head's channels as they are."""
    head_dim: int | None = None
    """For checkpoints that do not name one; None is hidden_size / num_attention_heads."""
    experts: Experts | None = None
    encoder: EncoderTraits | None = None
    """None: a decoder."""


def parse(raw: dict[str, Any]) -> HFConfig:
    """Raises ConfigError that names the field."""
    try:
        return msgspec.convert(raw, HFConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}") from error


def model_config(architecture: str, hf: HFConfig, traits: Traits) -> ModelConfig:
    """Raises ConfigError for sizes that do not fit, UnsupportedModel for what is not built here."""
    _refuse_unsupported(hf, traits)
    num_kv_heads = hf.num_key_value_heads or hf.num_attention_heads
    head_dim = hf.head_dim or traits.head_dim or hf.hidden_size // hf.num_attention_heads
    _check_sizes(hf, num_kv_heads, head_dim, traits.windows)
    if traits.experts is not None:
        _check_experts(traits.experts)
    parameters = dict(hf.rope_parameters or hf.rope_scaling or {})
    rotary_dim = _rotary_dim(parameters.pop("partial_rotary_factor", None), hf, traits, head_dim)
    rope = read_rope(
        parameters,
        theta=hf.rope_theta,
        max_position_embeddings=hf.max_position_embeddings,
        original_max_position_embeddings=hf.original_max_position_embeddings,
        rotary_dim=rotary_dim,
    )
    eos = hf.eos_token_id if traits.encoder is None else None
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=rope.window,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=rotary_dim,
        fused_projections=traits.fused_projections,
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        windows=traits.windows,
        dtype=_dtype(hf),
        eos_token_ids=token_ids("config.json: eos_token_id", eos, hf.vocab_size),
        experts=traits.experts,
        quantization=hf.quantization_config,
        generates=traits.encoder is None,
        encoder=traits.encoder,
    )


def needed(field: str, value: int | None) -> int:
    """ConfigError where config.json does not say."""
    if value is None:
        raise ConfigError(f"config.json: {field} is missing")
    return value


def token_ids(field: str, value: int | list[int] | None, vocab_size: int) -> tuple[int, ...]:
    """One id, several or none, as a tuple; ConfigError names `field` for an id out of range."""
    ids = [] if value is None else [value] if isinstance(value, int) else value
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ConfigError(f"{field}: {token_id} is outside the vocabulary of {vocab_size}")
    return tuple(dict.fromkeys(ids))


def _refuse_unsupported(hf: HFConfig, traits: Traits) -> None:
    acts = ("silu", "swish") if traits.encoder is None else ("gelu",)
    if hf.hidden_act not in acts:
        act = f"hidden_act {hf.hidden_act!r}"
        raise UnsupportedModel(f"config.json: {act} is not supported ({acts[0]})")
    if traits.encoder is not None:
        return
    if traits.fused_projections and hf.quantization_config is not None:
        what = "quantization_config of a family that stores its projections fused"
        raise UnsupportedModel(f"config.json: {what} is not supported")
    if not hf.is_causal:  # some embedding models are decoders trained to look at what comes, too
        raise UnsupportedModel("config.json: is_causal false is not supported")


def _check_sizes(
    hf: HFConfig, num_kv_heads: int, head_dim: int, windows: tuple[int | None, ...]
) -> None:
    sizes = {
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_hidden_layers": hf.num_hidden_layers,
        "num_attention_heads": hf.num_attention_heads,
        "max_position_embeddings": hf.max_position_embeddings,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "sliding_window": min((window for window in windows if window is not None), default=1),
    }
    for field, value in sizes.items():
        if value < 1:
            raise ConfigError(f"config.json: {field} must be positive, not {value}")
    if hf.num_attention_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads ({hf.num_attention_heads}) is not a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim ({head_dim}) must be even for rotary embedding")


def _rotary_dim(nested: Any, hf: HFConfig, traits: Traits, head_dim: int) -> int:
    """Return how many channels of a head are rotated. nested: the factor among the rope parameters,
    which counts more than the one beside them."""
    factor = hf.partial_rotary_factor if nested is None else nested
    field = "config.json: partial_rotary_factor"
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ConfigError(f"{field} must be a number, not {factor!r}")
    if factor == 1:
        return head_dim
    if not traits.rotates_part:
        raise UnsupportedModel(f"{field} other than 1 is not supported in this family")
    rotated = int(head_dim * factor) if 0 < factor < 1 else 0
    if rotated < 2 or rotated % 2:
        what = f"{factor} of {head_dim} channels is no even number of them"
        raise ConfigError(f"{field}: {what}")
    return rotated


def _check_experts(experts: Experts) -> None:
    if not 1 <= experts.experts_per_token <= experts.num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok ({experts.experts_per_token}) is not between 1 and "
            f"the number of experts ({experts.num_experts})"
        )
    if experts.intermediate_size < 1:
        raise ConfigError("config.json: moe_intermediate_size must be positive")


def _dtype(hf: HFConfig) -> DtypeName | None:
    name = hf.dtype or hf.torch_dtype
    if name is None:
        return None
    try:
        return msgspec.convert(name.removeprefix("torch."), DtypeName)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"config.json: dtype {name!r} is not supported") from error
