"""Load and memory of a server, as the server reports them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vcasgd.store.atomic import FULL_SHARE
from vcasgd.store.connection import RedisClient


@dataclass(frozen=True)
class ServerGauges:
    """Load and memory of one server.

    ``memory_limit_bytes`` is None without a limit, ``replicas`` the number of connected replicas,
    and ``lengths`` the entries in each requested stream.
    """

    memory_used_bytes: int
    memory_limit_bytes: int | None
    operations_per_second: int
    replicas: int
    lengths: tuple[int, ...] = ()

    @property
    def full(self) -> bool:
        """True near the memory limit; the ledger then accepts no new jobs."""
        limit = self.memory_limit_bytes
        return limit is not None and self.memory_used_bytes > FULL_SHARE * limit


def read_gauges(client: RedisClient, streams: Sequence[str] = ()) -> ServerGauges:
    """Read the gauges in one round trip. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
    with client.pipeline() as pipe:
        for section in ("memory", "stats", "replication"):
            pipe.info(section)
        for stream in streams:
            pipe.xlen(stream)
        memory, stats, replication, *lengths = pipe.execute()
    return ServerGauges(
        memory_used_bytes=int(memory["used_memory"]),
        memory_limit_bytes=int(memory.get("maxmemory") or 0) or None,
        operations_per_second=int(stats["instantaneous_ops_per_sec"]),
        replicas=int(replication.get("connected_slaves") or 0),
        lengths=tuple(lengths),
    )
