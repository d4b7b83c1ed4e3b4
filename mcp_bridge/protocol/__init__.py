"""The MCP protocol itself: JSON-RPC, its revisions and the translation between them, without
I/O."""
