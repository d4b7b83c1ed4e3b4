"""OpenAI's chat, completions, embeddings, files and batches: structs and conversions."""
