"""penny, a small model trained here: its corpus, its training script, its files, its card."""
