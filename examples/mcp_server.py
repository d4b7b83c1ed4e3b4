"""Serves two tools by MCP, with the official SDK: something to put behind the gateway.

[[mcp.servers]]
name = "library"
url = "http://127.0.0.1:9000/mcp"
network = "loopback"
"""

import os

from mcp.server import MCPServer

server = MCPServer("library")
BOOKS = {"dune": 3, "emma": 0}


@server.tool()
def find_book(title: str) -> str:
    """Say how many copies of a book can be lent."""
    return f"{BOOKS.get(title.lower(), 0)} of {title}"


@server.tool()
def list_books() -> list[str]:
    """List the titles."""
    return sorted(BOOKS)


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=int(os.environ.get("PORT", "9000")))
