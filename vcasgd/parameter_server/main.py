"""Main program of the parameter server, the process beside a tensors server.

Run it with ``python -m vcasgd.parameter_server.main``. Its memory may be lost at any line: after
a restart it takes over with a newer token and continues from the stored state.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from types import FrameType

import torch

from vcasgd.backoff import backoff
from vcasgd.errors import (
    Fenced,
    JobUnreadable,
    SnapshotMissing,
    StorageUnavailable,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    VcasgdError,
)
from vcasgd.learning.shards import MAX_SHARDS_OF_NODE
from vcasgd.logging import bound, configure_logging, exit_status, isolated
from vcasgd.parameter_server.blend import MAX_UPDATES
from vcasgd.parameter_server.shard import Shard
from vcasgd.settings import Settings, load_settings
from vcasgd.steady_time import steady_time
from vcasgd.storage.model_checkpoints import ModelCheckpoints
from vcasgd.storage.objects import Storage
from vcasgd.store.admission import TensorsAdmission
from vcasgd.store.connection import RedisClient, check_server, connect, patiently, without_secret
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import LostWorkers
from vcasgd.store.ledger.servers import Servers, node_name
from vcasgd.store.quotas import MemoryQuota, NodeGauges, Watchdog
from vcasgd.store.tensors.updates import Arrivals, wait_for_entries
from vcasgd.threads import Background, DaemonThreads

log = logging.getLogger(__name__)

#: Longest wait for updates before the loop does other work.
IDLE_SECONDS = 0.2
#: Pause in seconds after a failed request to a server.
PAUSE_SECONDS = 0.2
#: Longest pause of a job after unexpected failures, and their number after which its users get an
#: event.
MAX_PAUSE_SECONDS, FAILURES_BEFORE_EVENT = 30.0, 3
#: The same at the memory limit, near which waits of a second are usual.
MAX_FULL_SECONDS, FULL_BEFORE_EVENT = 5.0, 6
#: Seconds to wait for the ledger in calls that the loop has to wait for. A frozen ledger delays the
#: updates of all jobs by that.
PROMPT_SECONDS = 1.0
#: Seconds that a round waits for missing workers before this process asks whether they are known to
#: be lost, in every turn of its loop, which it makes at least as often.
WAITING_SECONDS = 0.1
#: Checkpoints that are read at a time; each takes the memory of a whole model.
MAX_READS = 2
#: Seconds between two looks at a part of the keys, for the quota of memory.
MEASURE_SECONDS = 1.0


@dataclass(frozen=True)
class JobsView:
    """Names of all active jobs, the records of those that were not known yet, and the workers that
    the others have lost."""

    active: tuple[str, ...]
    added: tuple[JobRecord, ...]
    lost: Mapping[str, frozenset[str]]


class ParameterServer:
    """Server of all jobs that have shards on one store node."""

    def __init__(
        self,
        settings: Settings,
        ledger: RedisClient,
        prompt: RedisClient,
        tensors: RedisClient,
    ) -> None:
        """``prompt``: connection to the ledger for calls that the loop has to wait for."""
        self._settings = settings
        self._ledger = ledger
        self._prompt = prompt
        self._tensors = tensors
        self._number = settings.node
        self._node = node_name(settings.node)
        self._jobs = Jobs(ledger)
        self._lost = LostWorkers(ledger)
        self._servers = Servers(ledger)
        self._storage = Storage(settings.required("storage_url"))
        self._gauges = NodeGauges(tensors)
        self._secret = settings.job_secret.get_secret_value() if settings.job_secret else None
        self._admission = (
            TensorsAdmission(tensors, ledger, self._secret, settings.lease_seconds)
            if self._secret
            else None
        )
        self._memory_quota = MemoryQuota(tensors)
        self._measured_at = float("-inf")
        #: Publications of each job at the last look at the memory, and looks in a row without room
        #: for updates or another publication.
        self._published: Mapping[str, int] = {}
        self._stuck: Counter[str] = Counter()
        #: Shards of each job.
        self._shards: dict[str, list[Shard]] = {}
        #: Jobs without a model.
        self._starting: set[str] = set()
        self._stop = threading.Event()
        self._reporter = ThreadPoolExecutor(1, thread_name_prefix="reports")
        # One thread for both, because :class:`LostWorkers` is for one.
        jobs = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self._readers = DaemonThreads(MAX_READS, "checkpoints")
        self._look = Background[JobsView](jobs)
        self._losses = Background[Mapping[str, frozenset[str]]](jobs)
        self._heartbeat_at = 0.0
        #: True while there are more new workers than can be admitted at once.
        self._admits_more = False
        #: Newest token of this process: its first one, or that of a shard that was loaded again.
        self._token = 0

    def stop(self) -> None:
        """End :meth:`run` after the present turn."""
        self._stop.set()

    def run(self) -> None:
        """Serve until :meth:`stop`. Raises :class:`Fenced` if a newer server has taken over."""
        self._token = patiently(
            lambda: self._servers.new_token(self._node), self._settings.patience_seconds
        )
        log.info("parameter server of %s has token %d", self._node, self._token)
        arrivals: Mapping[str, Arrivals] = {}
        while not self._stop.is_set():
            self._heartbeat()
            self._look_for_losses()
            self._check_memory()
            for shard in self._ready():
                with bound(job=shard.job, request=shard.request):
                    self._guarded_turn(shard, arrivals.get(shard.stream))
            arrivals = self._wait()

    def _check_memory(self) -> None:
        """Have jobs failed whose workers fill the tensors server; report jobs without room."""
        if time.monotonic() - self._measured_at < MEASURE_SECONDS:
            return
        self._measured_at = time.monotonic()
        jobs = self._starting | self._shards.keys()
        try:
            excess = self._memory_quota.excess(jobs, self._starting)
            full = self._memory_quota.full()
        except (StoreUnavailable, StoreDenied) as error:
            log.warning("tensors: %s", error)
            return
        for job, why in excess.items():
            log.error("%s: %s", job, why)
            self._report_invalid(job, why)
        self._report_without_room(full=full)

    def _report_without_room(self, *, full: bool) -> None:
        """Report jobs without a publication while the tensors server has no room for updates: if
        workers can't write any, no turn fails."""
        published = self._publications
        stuck = published.items() & self._published.items() if full else ()
        self._published = published
        self._stuck = Counter({job: self._stuck[job] + 1 for job, _ in stuck})
        for job, looks in self._stuck.items():
            if looks == FULL_BEFORE_EVENT and not any(each.failures for each in self._shards[job]):
                self._report_failing(job, StoreFull("no room for updates"))

    def _ready(self) -> list[Shard]:
        """Return the shards that read no checkpoint, and whose last turn didn't just fail."""
        now = time.monotonic()
        return [each for each in self._all_shards if each.retry_at <= now and not each.reading]

    @property
    def _all_shards(self) -> Iterator[Shard]:
        return chain.from_iterable(self._shards.values())

    def _guarded_turn(self, shard: Shard, arrivals: Arrivals | None) -> None:
        pause = PAUSE_SECONDS
        try:
            shard.turn(arrivals)
            shard.failures = 0
            return
        except Fenced as error:
            if self._is_superseded(shard):
                raise
            # A worker changed this job's record before its first model, or a failover brought back
            # another server's version. A new shard starts from what is stored.
            log.warning("%s: %s; it is loaded again", shard.job, error)
            self._reload(shard.job)
        except JobUnreadable as error:
            log.error("%s: %s", shard.job, error)
            self._report_invalid(shard.job, error.message)
        except StoreFull as error:
            # What lost workers pushed goes after a while, and other jobs end.
            log.warning("%s: %s", shard.job, error)
            pause = self._pause_after_failure(shard, error, FULL_BEFORE_EVENT, MAX_FULL_SECONDS)
        # SnapshotMissing: the server came back empty during the turn; the next one handles it.
        except (StoreUnavailable, SnapshotMissing, StorageUnavailable) as error:
            log.warning("%s: %s", shard.job, error)
            # A restarted server has lost its ACL users, which workers need.
            self._heartbeat_at = 0.0
        except Exception as error:
            # Data that workers wrote for one job must not stop the others.
            log.exception("%s", shard.job)
            pause = self._pause_after_failure(
                shard, error, FAILURES_BEFORE_EVENT, MAX_PAUSE_SECONDS
            )
        # Only this shard pauses.
        shard.retry_at = time.monotonic() + pause

    def _pause_after_failure(
        self, shard: Shard, error: Exception, before_event: int, longest: float
    ) -> float:
        """Return the seconds until the next turn; report the first shard of a job that fails so
        often."""
        shard.failures += 1
        # None if another one had the job loaded again.
        others = (each for each in self._shards.get(shard.job, ()) if each is not shard)
        if shard.failures == before_event and all(o.failures < before_event for o in others):
            self._report_failing(shard.job, error)
        return backoff(shard.failures, PAUSE_SECONDS, longest)

    def _is_superseded(self, shard: Shard) -> bool:
        """Return True if there really is a newer parameter server on this node.

        Only the platform writes what is compared here. A job's own record can't end this process.
        """
        try:
            newest = Servers(self._prompt).newest_token(self._node)
            return shard.superseded() or newest > self._token
        except (StoreUnavailable, StoreDenied, StoreFull):
            return False  # The next turn asks again.

    def _reload(self, job: str) -> None:
        """Drop a job's shards. They are added again under a token of their own, so no version has
        two forms."""
        try:
            self._token = Servers(self._prompt).new_token(self._node)
        except StoreError as error:
            log.warning("ledger: %s", error)
            return
        self._shards.pop(job, None)
        self._heartbeat_at = 0.0

    def _report_invalid(self, job: str, why: str) -> None:
        """Report that a job's workers stored what they may not; the controller fails the job."""
        self._tell(lambda jobs: jobs.report_invalid(job, self._number, f"on {self._node}, {why}"))

    def _report_failing(self, job: str, error: Exception) -> None:
        """Tell the users of a job why it doesn't progress."""
        full = isinstance(error, StoreFull)
        text = (
            f"the tensors server on {self._node} is at its memory limit, and updates wait: raise "
            "VCASGD_TENSORS_MEMORY_MB, add store nodes, or end other jobs"
            if full
            else f"the parameter server on {self._node} fails again and again: "
            f"{type(error).__name__}: {error}"
        )

        def tell(jobs: Jobs) -> None:
            # Without workers, no update waits.
            if not full or jobs.workers.count(job):
                jobs.event(job, "store-full" if full else "server-failing", text)

        self._tell(tell)

    def _tell(self, call: Callable[[Jobs], object]) -> None:
        """Report to the ledger, if it answers soon."""
        try:
            call(Jobs(self._prompt))
        except (StoreUnavailable, StoreDenied, StoreFull) as outage:
            log.warning("ledger: %s", outage)

    def _wait(self) -> Mapping[str, Arrivals]:
        """Wait for updates, and return those of each stream; at once if there are some already."""
        if not self._shards:
            self._stop.wait(self._idle_seconds)
            return {}
        try:
            shards = list(self._ready())
            longest = WAITING_SECONDS if self._rounds_wait else IDLE_SECONDS
            seconds = min([longest, *(shard.due_in for shard in shards)])
            positions = dict(each.position for each in shards)
            return wait_for_entries(self._tensors, positions, seconds, MAX_UPDATES)
        except (StoreUnavailable, StoreDenied):
            self._stop.wait(PAUSE_SECONDS)
            self._heartbeat_at = 0.0
            return {}

    @property
    def _idle_seconds(self) -> float:
        """Seconds to wait without a job: until the next heartbeat, unless an answer is due."""
        remaining = self._settings.heartbeat - (time.monotonic() - self._heartbeat_at)
        if self._look.busy or self._admits_more or remaining <= 0:
            return IDLE_SECONDS
        return remaining

    def _heartbeat(self) -> None:
        """Send a heartbeat and update the jobs: twice per heartbeat interval, once without jobs."""
        try:
            if (view := self._look.take()) is not None:
                self._use_jobs(view)
        except (StoreUnavailable, StoreDenied, StoreFull) as error:
            # Training continues without the ledger.
            log.warning("ledger: %s", error)
        period = self._settings.heartbeat / (2 if self._shards else 1)
        if time.monotonic() - self._heartbeat_at < period:
            if self._admits_more:
                self._admit()
            return
        self._heartbeat_at = time.monotonic()
        if not self._look.busy:
            description = self._description()
            known = {job: each[0].shards_here for job, each in self._shards.items()}
            self._look.start(lambda: self._read_jobs(description, known))
        self._admit()

    @property
    def _rounds_wait(self) -> bool:
        """True if a round has waited for a worker for so long that it may be lost."""
        return any(each.waiting_seconds > WAITING_SECONDS for each in self._all_shards)

    def _look_for_losses(self) -> None:
        """Ask for lost workers more often than with each heartbeat while rounds wait for some."""
        try:
            self._lose(self._losses.take() or {})
        except (StoreUnavailable, StoreDenied) as error:
            log.warning("ledger: %s", error)
        if self._rounds_wait and not self._losses.busy:
            known = frozenset(self._shards)
            self._losses.start(lambda: self._lost.news(known))

    def _lose(self, lost: Mapping[str, frozenset[str]]) -> None:
        for name in lost.keys() & self._shards.keys():
            for shard in self._shards[name]:
                shard.lose(lost[name])

    def _read_jobs(self, description: Mapping[str, object], known: Mapping[str, range]) -> JobsView:
        """Send a heartbeat, and read from the ledger which jobs are active. Runs in a thread."""
        self._servers.beat(self._node, description)
        active, added = self._jobs.active(), []
        for job in active:
            if job not in known:
                with isolated(job):
                    added.append(self._jobs.get(job))
        if self._admission is not None:
            # Before a job has facts, its first worker may make any shards that can be here.
            any_ = range(self._number, (self._number + 1) * MAX_SHARDS_OF_NODE)
            self._admission.refresh({job: known.get(job, any_) for job in active})
        return JobsView(tuple(active), tuple(added), self._lost.news(frozenset(known)))

    def _admit(self) -> None:
        if self._admission is None:
            return
        restarting = {shard.job for shard in self._all_shards if shard.awaits_first_snapshot}
        try:
            self._admits_more = not self._admission.admit(self._starting | restarting)
        except (StoreUnavailable, StoreFull) as error:
            log.warning("tensors: %s", error)
            self._heartbeat_at = 0.0

    @property
    def _publications(self) -> Mapping[str, int]:
        """Number of versions of each job that this process has published."""
        return {job: sum(each.publications for each in all_) for job, all_ in self._shards.items()}

    def _description(self) -> dict[str, object]:
        # Updates of a job wait in all of its shards alike.
        streams = {job: shards[0].stream for job, shards in self._shards.items()}
        publications = self._publications
        return {
            "at": steady_time(),
            "pid": os.getpid(),
            "token": self._token,
            "unreplicated": self._unreplicated(),
            "versions": {job: shards[0].version for job, shards in self._shards.items()},
            "publications": publications,
            **self._gauges.read(streams, publications),
        }

    def _unreplicated(self) -> dict[str, float]:
        """Return the Unix time since which each unreplicated server has had no replica."""
        servers = {"ledger": self._ledger.replication, "tensors": self._tensors.replication}
        return {
            name: each.unreplicated_since
            for name, each in servers.items()
            if each and each.unreplicated_since is not None
        }

    def _use_jobs(self, view: JobsView) -> None:
        for over in self._shards.keys() - set(view.active):
            for shard in self._shards.pop(over):
                with isolated(over):
                    shard.close()
        for job in view.added:
            if job.id not in self._shards:
                with isolated(job.id, job.request):
                    self._add(job)
        self._lose(view.lost)
        self._starting = set(view.active) - self._shards.keys()
        for shards in self._shards.values():
            for shard in shards:
                shard.memory_share = 1 / (len(self._shards) * len(shards))

    def _add(self, job: JobRecord) -> None:
        if job.facts is None or self._number >= job.facts.store_nodes:
            return
        numbers = job.facts.shards_of(self._number)
        log.info("serving shards %s of %d", [*numbers], job.facts.shards)
        self._shards[job.id] = [
            Shard(
                *(job, self._token),
                tensors=self._tensors,
                ledger=self._ledger,
                prompt=self._prompt,
                checkpoints=ModelCheckpoints(self._storage, job.id),
                job_secret=self._secret,
                number=number,
                executor=self._reporter,
                readers=self._readers,
            )
            for number in numbers
        ]


def main() -> int:
    """Run the server. Return 0 after SIGTERM, 3 if fenced, and 1 after any other error."""
    configure_logging("server")
    torch.set_num_threads(1)
    try:
        settings = load_settings()
        ledger = connect(settings.required("ledger_url"), over_limit=True)
        # At the memory limit, only its writes make room.
        tensors = connect(settings.own_tensors_url(), waits=False, over_limit=True)
        log.info("tensors server: %s", without_secret(settings.own_tensors_url()))
        Watchdog(ledger, "ledger").start()
        Watchdog(tensors, "tensors server").start()
        patiently(lambda: check_server(tensors, "tensors"), settings.patience_seconds)
        patiently(lambda: Control(ledger).claim(settings.cluster), settings.patience_seconds)
        prompt = connect(
            settings.required("ledger_url"), answer_seconds=PROMPT_SECONDS, over_limit=True
        )
        server = ParameterServer(settings, ledger, prompt, tensors)

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            server.stop()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        server.run()
    except Fenced as error:
        log.error("%s", error)
        return 3
    except VcasgdError as error:
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
