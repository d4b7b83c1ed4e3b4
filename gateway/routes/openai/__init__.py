"""The handlers of OpenAI's API: inference, files and batches."""
