"""A connection that is reset right after its handshake counts as an outage."""

from __future__ import annotations

import select
import socket
import struct
import threading

import pytest
from support.harness import RedisServer
from support.servers import url_of

from vcasgd.errors import StoreUnavailable
from vcasgd.store.bulk_transfer import BulkSocket, BulkTransfer
from vcasgd.store.connection import connect

pytestmark = pytest.mark.both_servers


class ResettingProxy:
    """Proxy between one client and a server that can reset the connection, as a firewall does."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._reset = threading.Event()
        self._start()

    def reset(self) -> None:
        """Reset the connection; return when the client's kernel knows. Accept the next one."""
        self._reset.set()
        self._thread.join()
        self._reset.clear()
        self._start()

    def close(self) -> None:
        self._reset.set()
        self._listener.close()
        self._thread.join()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    def _relay(self) -> None:
        self._listener.settimeout(0.01)
        while not self._reset.is_set():
            try:
                near, _ = self._listener.accept()
                break
            except TimeoutError:
                continue
            except OSError:
                return
        else:
            return
        far = socket.create_connection(("127.0.0.1", self._server.files.port))
        with near, far:
            while not self._reset.is_set():
                for end in select.select([near, far], [], [], 0.01)[0]:
                    other = far if end is near else near
                    other.sendall(end.recv(1 << 16))
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_reset_after_the_handshake_is_an_outage(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, tune, resets = ResettingProxy(server), BulkSocket._tune, [1]

    def tune_after_reset(own: BulkSocket) -> None:
        if resets and resets.pop():
            proxy.reset()
            with pytest.raises(OSError, match="not connected"):
                own._sock.getpeername()
        tune(own)

    monkeypatch.setattr(BulkSocket, "_tune", tune_after_reset)
    client = connect(url_of(server, 1, proxy.port))
    transfer = BulkTransfer(client)

    # A pushing thread retries this error, and ends with any other.
    with pytest.raises(StoreUnavailable):
        transfer.store([("k", memoryview(b"value"))])
    assert not resets
    transfer.store([("k", memoryview(b"value"))])

    assert connect(url_of(server, 1)).get("k") == b"value"
    client.close()
    proxy.close()
