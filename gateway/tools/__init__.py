"""Runs loops of a model's answer and its tool calls until the model answers without a call."""
