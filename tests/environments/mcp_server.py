"""An MCP server for tests: a notebook of one episode, and tools that do what they should not."""

import os
import sys
import time

from mcp.server.fastmcp import FastMCP

server = FastMCP("notebook")
notes: list[str] = []


@server.tool()
def note(text: str) -> str:
    """Keeps a note; tells how many there are."""
    notes.append(text)
    return f"{len(notes)} notes, {os.environ.get('COLOR')}"


@server.tool()
def fail() -> str:
    """Raises an error."""
    raise ValueError("no such page")


@server.tool()
def leave() -> str:
    """Ends the server."""
    sys.stdout.flush()
    os._exit(3)


@server.tool()
def hang() -> str:
    """Answers after a minute."""
    time.sleep(60)
    return "late"


server.run()
