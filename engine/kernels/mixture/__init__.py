"""Computes what differs by token: mixtures of experts and LoRA adapters."""
