"""Anthropic's Messages API, its batches, models and reports: structs and conversions."""
