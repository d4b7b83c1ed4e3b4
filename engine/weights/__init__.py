"""Checkpoint folders on disk to models in memory: safetensors, the registry of families, loading.
Above: `engine.core`. Below: `engine.models`. Knows no requests."""
