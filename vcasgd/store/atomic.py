"""Commands that one script runs: transactions, and commands that exceed a server's memory limit.

The limit is for what grows: new jobs and their histories. A job that runs needs a bounded amount
more for its leases, machines, and reports, and stopping it would free nothing. So scripts of the
platform have the flag ``allow-oom``, and plain commands run in such a script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

#: Share of a server's memory limit from which on it counts as full: new jobs are refused, so that
#: those that run have the rest.
FULL_SHARE = 0.95

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


def may_exceed(command: Sequence[Any]) -> bool:
    """Return True if a command may continue at the memory limit."""
    return command[0] not in _REFUSED


def as_one(commands: Iterable[Command], *, over_limit: bool) -> tuple[Any, ...]:
    """Return a command that runs others atomically, over the memory limit if they may."""
    arguments: list[Any] = []
    for (name, *rest), _ in commands:
        # redis-py has commands of two words
        words = [*str(name).split(), *rest]
        arguments += [len(words), *words]
        over_limit = over_limit and may_exceed((name,))
    return ("EVAL", f"#!lua flags=allow-oom\n{_SCRIPT}" if over_limit else _SCRIPT, 0, *arguments)


def converted(
    commands: Iterable[Command],
    answers: Iterable[Any],
    callbacks: Mapping[str, Callable[..., Any]],
) -> list[Any]:
    """Return the answers to :func:`as_one` as the library returns those of the commands."""
    results = []
    for (command, options), answer in zip(commands, answers, strict=True):
        # the library adds the keys for its cache
        own = {name: value for name, value in options.items() if name != "keys"}
        convert = callbacks.get(command[0])
        results.append(convert(answer, **own) if convert else answer)
    return results
