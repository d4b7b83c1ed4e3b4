"""OpenAI's Responses and Conversations APIs, with server-side tools: structs and conversions."""
