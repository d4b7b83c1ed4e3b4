"""Decoder models: one file a family, which reads its config.json; `decoder.py` is what they share.
Above: `engine.weights`, `engine.runner`. Below: `engine.layers`. Knows no files and no requests."""
