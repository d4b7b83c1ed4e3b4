"""The HTTP handlers: thin, one folder for each API surface, one file for each resource."""
