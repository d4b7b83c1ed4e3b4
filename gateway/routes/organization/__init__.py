"""The handlers of OpenAI's organization admin API, `/v1/organization`."""
