"""A server that appends lines to a file: MCP Python SDK 2.x. Usage: append2.py FILE [PORT]"""

import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("append")


@server.tool()
def append(line: str) -> str:
    """Appends a line. The pauses are where a kill makes a difference."""
    time.sleep(0.002)
    with open(sys.argv[1], "a") as file:
        file.write(line + "\n")
    time.sleep(0.002)
    return "appended"


@server.tool()
def lines() -> list[str]:
    """All lines."""
    with open(sys.argv[1], "a+") as file:
        file.seek(0)
        return file.read().splitlines()


if len(sys.argv) > 2:
    server.run("streamable-http", port=int(sys.argv[2]))
else:
    server.run("stdio")
