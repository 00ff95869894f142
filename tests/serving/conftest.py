"""The server that the files here ask: one for each of them."""

from live_server import live, server

__all__ = ["live", "server"]
