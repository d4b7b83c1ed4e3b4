"""Compares what the engines of a model may do: all the same, or some of them prompts for others."""
