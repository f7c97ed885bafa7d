"""A server that appends lines to a file: MCP Python SDK 1.x. Usage: append1.py FILE"""

import sys
import time

from mcp.server.fastmcp import FastMCP

server = FastMCP("append")


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


server.run("stdio")
