"""A server that appends lines to a file: MCP Python SDK 1.x. Usage: append1.py FILE [PORT]"""

import sys
import time

from mcp.server.fastmcp import FastMCP

port = int(sys.argv[2]) if len(sys.argv) > 2 else None
server = FastMCP("append", port=port or 8000, log_level="WARNING")


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


server.run("streamable-http" if port else "stdio")
