"""Turns text into token ids and back: tokenizers, chat templates, output parsers, the model hub."""
