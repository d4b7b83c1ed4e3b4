"""Computes what lies between products: norms, activations, rotary embeddings."""
