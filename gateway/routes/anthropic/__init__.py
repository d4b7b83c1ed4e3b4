"""The handlers of Anthropic's API: messages, message batches and reports."""
