"""HTTP servers of a test, on a free port of the loopback interface."""

from __future__ import annotations

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Self


class QuietHandler(BaseHTTPRequestHandler):
    """Handler that logs nothing."""

    timeout = 30.0

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def body(self) -> bytes:
        """Return the content of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, content: bytes | str = b"", **headers: str) -> None:
        """Send a whole response; ``_`` in names of headers stands for a hyphen."""
        payload = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        # The client may have left.
        with suppress(ConnectionError):
            self.wfile.write(payload)


class LocalServer(ThreadingTCPServer):
    """Server that listens from its construction on, and answers from :meth:`start` on.

    It isn't an ``HTTPServer``, which first looks up its own host name.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, handler: Any, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
