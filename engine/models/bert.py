"""BERT (arXiv:1810.04805), of which sentence-transformers' small models are made: an encoder.

What it computes is in `models/encoder.py`.
"""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.models.config import EncoderTraits, HFConfig, Traits


def from_hf(hf: HFConfig) -> Traits:
    """Raises UnsupportedModel."""
    if hf.position_embedding_type != "absolute":
        raise UnsupportedModel(
            f"config.json: position_embedding_type {hf.position_embedding_type!r} is not supported"
            " (absolute)"
        )
    encoder = EncoderTraits(
        num_layers=hf.num_hidden_layers,
        layer_norm_eps=hf.layer_norm_eps,
        type_vocab_size=hf.type_vocab_size,
    )
    return Traits(encoder=encoder)
