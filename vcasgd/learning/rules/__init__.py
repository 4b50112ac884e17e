"""Update rules: how an update changes the global vector.

``W`` is the global vector, ``w`` the worker's copy, ``w₀`` the base it was trained from,
``Δ = w − w₀``, τ the staleness and s(τ) its weight. Every rule acts element by element, so a
vector can be cut into shards anywhere with the same result.

Running statistics (BatchNorm) are averaged, not summed: all workers measure the same quantity,
and a sum of differences would move it once per worker.

``base``         the interface of a rule, and its context
``rounds``       the default: means of the workers' copies, round by round
``asynchronous`` rules that apply each update when it arrives: ``vc-asgd``, ``sma``,
                 ``async-local-sgd``
"""

from __future__ import annotations

from vcasgd.learning.rules.asynchronous import AsyncLocalSgd, Sma, VcAsgd
from vcasgd.learning.rules.base import (
    Context,
    Payload,
    Rule,
    interval_start,
    merge_integers,
    payload_of,
)
from vcasgd.learning.rules.rounds import Rounds
from vcasgd.spec.update import Update

__all__ = [
    "Context",
    "Payload",
    "Rounds",
    "Rule",
    "interval_start",
    "make_rule",
    "merge_integers",
    "payload_of",
]

_RULES: dict[str, type[Rule]] = {
    "rounds": Rounds,
    "vc-asgd": VcAsgd,
    "sma": Sma,
    "async-local-sgd": AsyncLocalSgd,
}


def make_rule(update: Update) -> Rule:
    """Return the rule of a job."""
    return _RULES[update.rule](update)
