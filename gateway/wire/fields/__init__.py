"""The generator of docs/fields.md: which field of which API is honoured, ignored or refused."""
