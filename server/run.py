"""Serving: a thread for the connections; the thread that calls it loads models and decodes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.server.app import Server, app_of
from sequoia_plan.server.worker import Worker

MAX_CONNECTIONS = 200
"""Of more, each request is answered by 503; of twice as many, the rest is closed."""
MAX_HEADER = 32 * 1024
HEADER_SECONDS = 30.0
"""A client must have sent the header of a request, bytes and seconds."""


def serve(
    load: Callable[[], Worker],
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    key: str | None = None,
    cors: str | None = None,
    max_tokens: int = 2048,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Answer requests until the worker's queue has None, or an interrupt comes.

    Args:
        load: loads the models; meanwhile `/health` says so.
        host: the address to listen on.
        port: 0 takes a free one.
        key: what clients must send, as `Authorization: Bearer KEY`.
        cors: the origin of pages that may ask the server from a browser.
        max_tokens: new tokens of a request that names no number.
        on_ready: called with the URL once requests are answered.

    Raises:
        SequoiaPlanError: if nothing can listen on the address, or the models cannot be loaded.
    """
    listener = _listener(host, port)
    server = Server(key, max_tokens)
    config = uvicorn.Config(
        app_of(server, cors), http=PatientProtocol, ws="none", lifespan="off", log_config=None,
        log_level="error", access_log=False, proxy_headers=False, server_header=False,
        limit_concurrency=MAX_CONNECTIONS, h11_max_incomplete_event_size=MAX_HEADER,
        timeout_keep_alive=60,
    )  # fmt: skip
    connections = uvicorn.Server(config)
    arguments = {"sockets": [listener]}
    thread = threading.Thread(target=connections.run, kwargs=arguments, daemon=True)
    thread.start()
    try:
        server.worker = load()
        name = f"[{host}]" if ":" in host else host
        on_ready(f"http://{name}:{listener.getsockname()[1]}")
        server.worker.run()
    finally:
        connections.should_exit = connections.force_exit = True
        thread.join(5)


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens; SequoiaPlanError if the address is taken or not this machine's."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise SequoiaPlanError(
            f"--host {host} --port {port}: {error}; name another --port, or an address of this "
            "machine"
        ) from error


class PatientProtocol(H11Protocol):
    """A connection that is closed if its first header is not complete in time."""

    def connection_made(self, transport: Any) -> None:
        """Close the connection if its header is late, or at once if there are too many."""
        super().connection_made(transport)
        wait = 0 if len(self.connections) > 2 * MAX_CONNECTIONS else HEADER_SECONDS
        self.loop.call_later(wait, lambda: self.cycle or transport.close())
