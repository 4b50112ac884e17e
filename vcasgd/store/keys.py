"""The names of all keys, in one place.

The braces are Redis Cluster's hash tags: all keys that one script touches share one, so
they live on one node.
"""

from __future__ import annotations

from dataclasses import dataclass

#: of all jobs, by time of submission
JOBS = "vcasgd:{fleet}:jobs"
#: of jobs that are not over
ACTIVE = "vcasgd:{fleet}:active"
#: whose ledger it is
CLUSTER = "vcasgd:{fleet}:cluster"
#: who is the controller
CONTROLLER = "vcasgd:{fleet}:controller"
#: what the API asks of the controller
COMMANDS = "vcasgd:{fleet}:commands"
#: the controller's view of machines, for those who look
INSTANCES = "vcasgd:{fleet}:instances"
#: the controller's view of pools
POOLS = "vcasgd:{fleet}:pools"
#: what is remembered of each pool from one controller to the next
LAUNCHES = "vcasgd:{fleet}:launches"
#: by pool: which labels its machines may see, separated by blanks
CLEARANCES = "vcasgd:{fleet}:clearances"
#: machine → up to when it is paid for, and by whom
METERS = "vcasgd:{fleet}:meters"
#: name and task of jobs → how fast machines were at them
WORKLOADS = "vcasgd:{fleet}:workloads"
#: the newest token of each parameter server
SERVER_TOKENS = "vcasgd:{fleet}:server-tokens"
#: the last heartbeat of each parameter server
SERVERS = "vcasgd:{fleet}:servers"


def idempotency(key: str) -> str:
    return f"vcasgd:{{fleet}}:idempotency:{key}"


@dataclass(frozen=True)
class LedgerKeys:
    """Keys of one job in the ledger."""

    job: str

    def _key(self, name: str) -> str:
        return f"vcasgd:{{fleet}}:job:{self.job}:{name}"

    @property
    def record(self) -> str:
        """hash: spec, state"""
        return self._key("record")

    @property
    def facts(self) -> str:
        """hash: ``facts``, what only the user's code knows; workers write it, and not the record"""
        return self._key("facts")

    @property
    def work(self) -> str:
        """hash: finished, total, per_epoch, lead; workers only read it"""
        return self._key("work")

    @property
    def counters(self) -> str:
        """hash: next, tokens, expired, ``again:<subtask>`` where it was leased more than once; what
        leasing writes, and so workers"""
        return self._key("counters")

    @property
    def shards(self) -> str:
        """hash, what parameter servers told: ``<shard>:`` token, version, finished, totals"""
        return self._key("shards")

    @property
    def tuning(self) -> str:
        """hash: what was found by measuring, as JSON; the controller writes it"""
        return self._key("tuning")

    @property
    def leases(self) -> str:
        """sorted set: piece of work → deadline in ms of the server's clock"""
        return self._key("leases")

    @property
    def holders(self) -> str:
        """hash: piece of work → ``worker|token``"""
        return self._key("holders")

    @property
    def open(self) -> str:
        """sorted set: pieces of work that nobody holds; the lowest score is given out first"""
        return self._key("open")

    @property
    def done(self) -> str:
        """set: subtasks of unfinished epochs that are applied in every shard"""
        return self._key("done")

    @property
    def applied(self) -> str:
        """set: ``<shard>:<subtask>``, applied in a shard that has not finished its epoch"""
        return self._key("applied")

    @property
    def evaluations(self) -> str:
        """hash: epoch → result"""
        return self._key("evaluations")

    @property
    def workers(self) -> str:
        """hash: worker → last heartbeat"""
        return self._key("workers")

    @property
    def draining(self) -> str:
        """set: workers that were asked to leave"""
        return self._key("draining")

    @property
    def quarantine(self) -> str:
        """hash: worker → why it gets no more work"""
        return self._key("quarantine")

    @property
    def placed(self) -> str:
        """hash: worker → ``pool|digest of its pass``, as the controller started it"""
        return self._key("placed")

    @property
    def refused(self) -> str:
        """hash: worker → why it was last refused for want of a clearance"""
        return self._key("refused")

    @property
    def failures(self) -> str:
        """list: errors of the user's code"""
        return self._key("failures")

    @property
    def vanished(self) -> str:
        """hash: instance → how the job lost it"""
        return self._key("vanished")

    @property
    def machines(self) -> str:
        """hash: instance → what it did for the job, and when"""
        return self._key("machines")

    @property
    def costs(self) -> str:
        """hash: what its machines have cost so far, by pool, kind and what they did"""
        return self._key("costs")

    @property
    def checkpoints(self) -> str:
        """hash: checkpoint → description"""
        return self._key("checkpoints")

    @property
    def events(self) -> str:
        """stream"""
        return self._key("events")

    @property
    def metrics(self) -> str:
        """stream: samples of the totals over time"""
        return self._key("metrics")

    @property
    def logs(self) -> str:
        """stream: lines that workers printed"""
        return self._key("logs")

    def all(self) -> list[str]:
        names = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        return [getattr(self, name) for name in names]


@dataclass(frozen=True)
class TensorKeys:
    """Keys of one shard of one job in a tensors server."""

    job: str
    shard: int = 0

    @property
    def prefix(self) -> str:
        return f"vcasgd:{{{self.job}:{self.shard}}}:"

    def _key(self, name: str) -> str:
        return f"{self.prefix}{name}"

    @property
    def fence(self) -> str:
        """the token of the parameter server that may write"""
        return self._key("fence")

    @property
    def meta(self) -> str:
        """the present snapshot: version, size, where its chunks are"""
        return self._key("meta")

    @property
    def applied(self) -> str:
        """hash, the applied record: ``finished`` → epochs, subtask → up to which sample"""
        return self._key("applied")

    @property
    def pushed(self) -> str:
        """hash: subtask → ``position|update``, up to where it was pushed and by which update"""
        return self._key("pushed")

    @property
    def tokens(self) -> str:
        """hash: subtask → newest lease token seen"""
        return self._key("tokens")

    @property
    def stream(self) -> str:
        """stream: headers of updates that wait"""
        return self._key("updates")

    @property
    def places(self) -> str:
        """sorted set: update → until when its place is held, in ms; for ever in the stream"""
        return self._key("places")

    @property
    def window(self) -> str:
        """how many places there are"""
        return self._key("window")

    @property
    def news(self) -> str:
        """stream with one entry, a new one at each commit: what workers wait for"""
        return self._key("news")

    @property
    def rejected(self) -> str:
        """hash: update → reason, for the worker that sent it"""
        return self._key("rejected")

    @property
    def pins(self) -> str:
        """hash: name → a snapshot that must stay"""
        return self._key("pins")

    @property
    def wanted(self) -> str:
        """set: names under which the present snapshot is to be pinned"""
        return self._key("wanted")

    def snapshot_chunk(self, version: int, token: int, name: str) -> str:
        return self._key(f"s:{version}.{token}:{name}")

    def payload_chunk(self, update: str, index: int) -> str:
        return self._key(f"u:{update}:{index}")
