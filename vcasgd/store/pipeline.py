"""Pipelines that raise our errors, wait for replicas, and may exceed a server's memory limit.

The limit is for what grows: new jobs and their histories. A job that runs needs a bounded amount
more for its leases, machines, and reports, and stopping it would free nothing. So scripts of the
platform have the flag ``allow-oom``, and plain commands run in such a script. Transactions that
write are such a script, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redis.client import Pipeline
from redis.exceptions import OutOfMemoryError

from vcasgd.store.replies import mapped_errors

if TYPE_CHECKING:
    from vcasgd.store.connection import RedisClient

#: Share of a server's memory limit from which on it counts as full: new jobs are refused, so that
#: those that run have the rest.
FULL_SHARE = 0.95

#: Read-only commands; all others wait for the replicas.
# fmt: off
READS = frozenset((
    "ACL", "CLIENT", "CONFIG", "EXISTS", "GET", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN",
    "HMGET", "HVALS", "INFO", "LLEN", "LRANGE", "MEMORY USAGE", "MGET", "PING", "PTTL", "SCAN",
    "SCARD", "SCRIPT EXISTS", "SCRIPT LOAD", "SISMEMBER", "SMEMBERS", "SRANDMEMBER", "STRLEN",
    "TIME", "TTL", "TYPE", "WAIT", "XINFO STREAM", "XLEN", "XRANGE", "XREAD", "XREVRANGE", "ZCARD",
    "ZMSCORE", "ZRANGE", "ZRANGEBYSCORE", "ZREVRANGE", "ZREVRANK", "ZSCORE",
))
# fmt: on

#: Runs commands, each given by its number of arguments and these. Returns the answers. Lua can't
#: unpack more than some thousand arguments, so a longer command, which is variadic after its key
#: (such as HSET), is run in parts.
_SCRIPT = """local answers, at = {}, 1
while at <= #ARGV do
  local last, answer = at + tonumber(ARGV[at]), nil
  if last - at <= 4000 then
    answer = redis.call(unpack(ARGV, at + 1, last))
  else
    for first = at + 3, last, 2000 do
      local part = math.min(first + 1999, last)
      answer = redis.call(ARGV[at + 1], ARGV[at + 2], unpack(ARGV, first, part))
    end
  end
  answers[#answers + 1] = answer
  at = last + 1
end
return answers"""

#: Commands that add to a job's history, and scripts, which have a flag of their own.
_REFUSED = frozenset(("XADD", "EVALSHA", "EVAL"))

#: A command of a pipeline, with the library's options.
Command = tuple[Sequence[Any], dict[str, Any]]


class StorePipeline(Pipeline):
    """A pipeline that raises our errors.

    Its writes wait for the replicas and exceed the memory limit as those of its client do. A
    transaction that writes is one script.
    """

    def __init__(self, client: RedisClient, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._replication = client.replication if client.waits else None
        self._over_limit = client.over_limit

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands: list[Command] = list(self.command_stack)
        with mapped_errors():
            if self.transaction and not _only_read(commands):
                results = self._as_script(commands)
            else:
                try:
                    results = self._in_one_trip()
                except OutOfMemoryError:
                    # A server at its limit queues not even the reads of a transaction.
                    results = self._as_script(commands)
                self._repeat_refused(commands, results)
            for result in results if raise_on_error else ():
                if isinstance(result, Exception):
                    raise result
        return results

    def _in_one_trip(self) -> list[Any]:
        """Return the answers, some of which can be errors."""
        wait = None
        if self._replication is not None and not _only_read(self.command_stack):
            wait = self._replication.command()
        if wait is not None:
            self.execute_command(*wait)
        results: list[Any] = super().execute(raise_on_error=False)
        if wait is not None and self._replication is not None:
            acknowledged = results.pop()
            if isinstance(acknowledged, Exception):
                raise acknowledged
            self._replication.record_answer(acknowledged)
        return results

    def _as_script(self, commands: list[Command]) -> list[Any]:
        self.reset()
        self.transaction = False
        self.execute_command(*_as_one(commands, over_limit=self._over_limit))
        (answers,) = self._in_one_trip()
        if isinstance(answers, Exception):
            raise answers
        return _converted(commands, answers, self.response_callbacks)

    def _repeat_refused(self, commands: list[Command], results: list[Any]) -> None:
        """Repeat commands that the server refused at its limit, if they may exceed it."""
        refused = [
            at
            for at, ((command, _), answer) in enumerate(zip(commands, results, strict=True))
            if self._over_limit and isinstance(answer, OutOfMemoryError) and may_exceed(command)
        ]
        if refused:
            again = self._as_script([commands[at] for at in refused])
            for at, result in zip(refused, again, strict=True):
                results[at] = result


def _only_read(commands: list[Command]) -> bool:
    return all(args[0] in READS for args, _ in commands)


def may_exceed(command: Sequence[Any]) -> bool:
    """Return True if a command may continue at the memory limit."""
    return command[0] not in _REFUSED


def _as_one(commands: Iterable[Command], *, over_limit: bool) -> tuple[Any, ...]:
    """Return a command that runs others atomically, over the memory limit if they may."""
    arguments: list[Any] = []
    for (name, *rest), _ in commands:
        # redis-py has commands of two words
        words = [*str(name).split(), *rest]
        arguments += [len(words), *words]
        over_limit = over_limit and may_exceed((name,))
    return ("EVAL", f"#!lua flags=allow-oom\n{_SCRIPT}" if over_limit else _SCRIPT, 0, *arguments)


def _converted(
    commands: Iterable[Command],
    answers: Iterable[Any],
    callbacks: Mapping[str, Callable[..., Any]],
) -> list[Any]:
    """Return the answers to :func:`_as_one` as the library returns those of the commands."""
    results = []
    for (command, options), answer in zip(commands, answers, strict=True):
        # the library adds the keys for its cache
        own = {name: value for name, value in options.items() if name != "keys"}
        convert = callbacks.get(command[0])
        results.append(convert(answer, **own) if convert else answer)
    return results
