"""Turns logits into next tokens, log probabilities and embeddings."""
