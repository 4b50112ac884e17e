"""Load of a server, quotas of what a job's workers write, and the end of endless scripts.

Workers write directly, because a server checks the commands of a script against the rules of the
user that runs it. So a hostile one can write any amount, while readers hold a whole key in memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vcasgd.errors import StoreError, StoreUnavailable
from vcasgd.limits import MAX_ENTRIES, MAX_SHARE_BESIDE_OTHERS
from vcasgd.schemas.fleet import ServerGaugesView
from vcasgd.store.connection import RedisClient
from vcasgd.store.pipeline import FULL_SHARE
from vcasgd.store.tensors.snapshot_index import SCANNED, SCANS

log = logging.getLogger(__name__)

#: Seconds for which a job may keep what it wrote while it was alone: updates in transit are
#: processed meanwhile, and slots of silent workers released.
GRACE_SECONDS = 60.0
#: Bytes of a chunk of an update that arrives: it is buffered before it becomes a string.
CHUNK_ROOM = 2 << 20
#: Shortest period for a rate; rates over less are too noisy.
RATE_SECONDS = 1.0
#: Seconds between two probes of a :class:`Watchdog`.
PROBE_SECONDS = 1.0


class ContentQuota:
    """Quota of some keys of a server: :data:`MAX_ENTRIES`, and for each a number of bytes.

    It is checked every ``period`` seconds.
    """

    def __init__(
        self, server: RedisClient, max_bytes: Mapping[str, int], period: float = 0.0
    ) -> None:
        self._server = server
        self._max_bytes = dict(max_bytes)
        self._period = period
        self._checked_at = float("-inf")
        self._usage = server.script("usage")

    def enforce(self) -> str | None:
        """Delete keys that exceed their quota, and return why the job has to end; None without.

        Raises :class:`~vcasgd.errors.StoreUnavailable`. Measuring 10,000 entries takes the server
        about a millisecond.
        """
        if time.monotonic() - self._checked_at < self._period:
            return None
        self._checked_at = time.monotonic()
        sizes = self._usage(keys=list(self._max_bytes), args=[MAX_ENTRIES])
        excess = {
            key: _excess(key, entries, used, allowed)
            for (key, allowed), (entries, used) in zip(self._max_bytes.items(), sizes, strict=True)
            if entries > MAX_ENTRIES or used > allowed
        }
        if not excess:
            return None
        self._server.unlink(*excess)
        return next(iter(excess.values()))


def _excess(key: str, entries: int, used: int, allowed: int) -> str:
    written, limit = f"{used >> 20} MiB", str(allowed >> 20)
    if entries > MAX_ENTRIES:
        written, limit = f"{entries} entries", str(MAX_ENTRIES)
    name = key.rpartition(":")[2]
    return f"the job's workers wrote {written} of {name}, at most {limit} are allowed"


class MemoryQuota:
    """Quota of each job beside others on a tensors server, if that has a memory limit.

    Workers write payloads, moments, and the first snapshot under names that they choose, so only a
    look at all keys finds what a hostile one has written.
    """

    def __init__(self, tensors: RedisClient) -> None:
        self._tensors = tensors
        self._measure = tensors.script("tensors/measure")
        self._cursor = b"0"
        self._used: Counter[bytes] = Counter()
        #: When a job was alone last. It may have been until now, without a parameter server.
        self._alone_at = time.monotonic()

    def excess(self, jobs: Collection[str], without_model: Collection[str]) -> dict[str, str]:
        """Measure the next keys; return why jobs have to end, if all keys are measured now.

        ``jobs`` are all active ones. Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        if len(jobs) == 1:
            self._alone_at = time.monotonic()
        for _ in range(SCANS):
            self._cursor, *found = self._measure(args=[self._cursor, SCANNED])
            self._used.update(dict(zip(found[::2], found[1::2], strict=True)))
            if self._cursor == b"0":
                return self._excess(jobs, without_model)
        return {}

    def full(self) -> bool:
        """Return True if there is no room for a chunk. Raises
        :class:`~vcasgd.errors.StoreUnavailable`."""
        memory = self._tensors.info("memory")
        return 0 < int(memory["maxmemory"]) < int(memory["used_memory"]) + CHUNK_ROOM

    def _excess(self, jobs: Collection[str], without_model: Collection[str]) -> dict[str, str]:
        used, self._used = self._used, Counter()
        limit = int(self._tensors.info("memory")["maxmemory"])
        allowed = int(limit * MAX_SHARE_BESIDE_OTHERS)
        if not limit or time.monotonic() - self._alone_at < GRACE_SECONDS:
            return {}
        written = {job: used[f"u:{job}".encode()] for job in jobs}
        # Once there is a model, only the parameter server writes snapshots.
        for job in without_model:
            written[job] += used[f"s:{job}".encode()]
        return {
            job: f"the job's workers wrote {size >> 20} MiB into the tensors server, at most "
            f"{allowed >> 20} are allowed beside other jobs"
            for job, size in written.items()
            if size > allowed
        }


def read_gauges(client: RedisClient) -> ServerGaugesView:
    """Read the gauges in one round trip. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
    with client.pipeline() as pipe:
        for section in ("memory", "stats", "replication"):
            pipe.info(section)
        memory, stats, replication = pipe.execute()
    used, limit = int(memory["used_memory"]), int(memory.get("maxmemory") or 0) or None
    return ServerGaugesView(
        memory_used_bytes=used,
        memory_limit_bytes=limit,
        full=limit is not None and used > FULL_SHARE * limit,
        operations_per_second=float(stats["instantaneous_ops_per_sec"]),
        replicas=int(replication.get("connected_slaves") or 0),
    )


class NodeGauges:
    """Gauges of a tensors server, and the publication rate of its parameter server."""

    def __init__(self, tensors: RedisClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._tensors = tensors
        self._clock = clock
        self._counted_at = clock()
        self._counts: Mapping[str, int] = {}
        self._rate = 0.0
        self._last: dict[str, Any] = {}
        self._read_at = float("-inf")

    def read(self, streams: Mapping[str, str], publications: Mapping[str, int]) -> dict[str, Any]:
        """Return the gauges as JSON values, at most a second old. Both arguments are by job.

        If the tensors server does not answer or denies access, only the rate is returned.
        """
        # A server describes itself at length, and heartbeats are more frequent.
        same = self._last.get("queued", {}).keys() == streams.keys()
        if same and self._clock() - self._read_at < RATE_SECONDS:
            return self._last
        self._last = self._read(streams, publications)
        self._read_at = self._clock()
        return self._last

    def _read(self, streams: Mapping[str, str], publications: Mapping[str, int]) -> dict[str, Any]:
        rate = {"publications_per_second": self._publication_rate(publications)}
        try:
            gauges = read_gauges(self._tensors).model_dump(exclude={"unreplicated_since"})
            with self._tensors.pipeline() as pipe:
                for stream in streams.values():
                    pipe.xlen(stream)
                queued = dict(zip(streams, pipe.execute(), strict=True))
        except StoreError:
            return rate
        return {**gauges, **rate, "queued": queued}

    def _publication_rate(self, publications: Mapping[str, int]) -> float:
        seconds = self._clock() - self._counted_at
        if seconds >= RATE_SECONDS:
            new = sum(count - self._counts.get(job, 0) for job, count in publications.items())
            self._rate = new / seconds
            self._counted_at, self._counts = self._clock(), publications
        return self._rate


class Watchdog(threading.Thread):
    """Thread that probes a server, and ends endless scripts. ``name`` is for the log.

    While a script runs for longer than ``busy-reply-threshold`` (5 s by default), a server answers
    ``BUSY`` to everybody, for as long as the script runs. Workers can run only scripts whose loops
    are bounded, so this is the second line of defense.
    """

    def __init__(self, server: RedisClient, name: str) -> None:
        super().__init__(name=f"watchdog-{name}", daemon=True)
        self._server = server
        self._server_name = name
        self._pause = threading.Event()

    def run(self) -> None:
        while not self._pause.wait(PROBE_SECONDS):
            try:
                self._probe()
            except Exception:
                # A probe that stops is none.
                log.exception("probe of the %s", self._server_name)

    def _probe(self) -> None:
        try:
            self._server.ping()
        except StoreUnavailable:
            self._kill_script()
        except StoreError as error:
            log.warning("%s: %s", self._server_name, error)

    def _kill_script(self) -> None:
        """Kill the running script, if the server is busy with one that has not written yet."""
        try:
            self._server.execute_command("SCRIPT KILL")
        except StoreUnavailable:
            return  # The server is down or frozen.
        except StoreError as error:
            if "UNKILLABLE" in error.message:
                log.error("%s: blocked by a script: %s", self._server_name, error)
            return
        log.error("%s: killed a script that blocked it", self._server_name)
