"""Runs as the command that the public suite starts for a scenario: `mcp_client_shim.py SOCKET URL`.
The scenario goes to whoever listens there; it failed if anything comes back, which is printed.
Nothing of ours is imported: the suite starts dozens at once."""

import json
import os
import socket
import sys

if __name__ == "__main__":
    asked = {
        "name": os.environ["MCP_CONFORMANCE_SCENARIO"],
        "url": sys.argv[2],
        "revision": os.environ["MCP_CONFORMANCE_PROTOCOL_VERSION"],
        "context": json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}")),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        connection.sendall(json.dumps(asked).encode() + b"\n")
        said = b""
        while chunk := connection.recv(65536):
            said += chunk
    sys.exit(said.decode() if said else 0)
