"""Numbers that a task or a loop logs with ``vcasgd.log``, as sums for one push interval.

They travel with the interval's update, so each logged value counts once if the update is applied,
and not at all if it isn't.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Mapping
from typing import Any

from vcasgd.errors import UserCodeError
from vcasgd.limits import MAX_LOGGED

logger = logging.getLogger(__name__)

#: Pattern of the name of a logged metric.
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_./@-]{0,63}$"
#: Largest magnitude of a sum; sums of such values stay finite.
LARGEST = 1e200

#: Sum and number of values by name.
Sums = dict[str, tuple[float, int]]


class LoggedSums:
    """Sums of what was logged since the last :meth:`take`. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Sums, which are tensors while a GPU computes them, and numbers of values.
        self._sums: dict[str, tuple[Any, int]] = {}
        #: All names so far.
        self._names: set[str] = set()

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values. Raises :class:`UserCodeError`."""
        numbers = {_checked_name(name): _number(name, value) for name, value in values.items()}
        with self._lock:
            self._names |= numbers.keys()
            if len(self._names) > MAX_LOGGED:
                raise UserCodeError(
                    f"vcasgd.log: more than {MAX_LOGGED} metrics",
                    remedy="log fewer names; they must not contain numbers of steps or samples",
                )
            for name, number in numbers.items():
                before, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = before + number, count + 1

    def take(self) -> Sums:
        """Return the finite sums, and start again."""
        with self._lock:
            found, self._sums = self._sums, {}
        sums = {name: (float(total), count) for name, (total, count) in found.items()}
        finite = {
            name: each for name, each in sums.items()
            if math.isfinite(each[0]) and abs(each[0]) <= LARGEST
        }  # fmt: skip
        if missing := sorted(sums.keys() - finite.keys()):
            logger.warning("not finite, and left out of the metrics: %s", ", ".join(missing))
        return finite


#: What this process has logged since its interval began.
collected = LoggedSums()


def log(values: Mapping[str, Any]) -> None:
    """Log numbers from a step of a task or a loop, for example ``vcasgd.log({"grad_norm": 1.5})``.

    Each value is a number or a tensor with one element. A job's metrics show the mean of all values
    of a name since the previous point, over all steps and workers, as ``logged.<name>``. The values
    of a step count exactly once, as its samples do; in a loop, call it before ``session.step``.
    Values that are logged in an evaluation are dropped. A script that runs on its own prints the
    means after each epoch.

    Raises :class:`~vcasgd.errors.UserCodeError` for a value that is no number, a name that isn't
    one of 64 letters, digits, and ``_./@-``, or too many names.
    """
    collected.add(values)


def _checked_name(name: object) -> str:
    if isinstance(name, str) and re.fullmatch(NAME_PATTERN, name):
        return name
    raise UserCodeError(
        f"vcasgd.log: {name!r:.80} is not a name",
        remedy="use up to 64 letters, digits, and _./@-",
    )


def _number(name: str, value: Any) -> Any:
    """Return a number, or a tensor of one element that no gradient needs."""
    if hasattr(value, "detach") and getattr(value, "numel", lambda: 0)() == 1:
        return value.detach().float().reshape(())
    try:
        if not isinstance(value, bool | str):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserCodeError(
        f"vcasgd.log: {name} is a {type(value).__name__}, not a number",
        remedy="log a number, or a tensor with one element",
    )
