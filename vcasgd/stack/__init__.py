"""Supervised processes of a stack on one machine, as ``vcasgd up`` starts them.

A *guardian* process forks the *supervisor*, which starts the parts in order, restarts dead parts,
and stops all parts in reverse order. No process outlives the stack:

==================  ==========================================================================
killed with −9      consequence
==================  ==========================================================================
a part              the supervisor kills its helpers and restarts it after a growing pause
the supervisor      the kernel kills the parts, and the guardian kills their helpers
the guardian        the supervisor stops everything in order
all of them         the parts die with the supervisor; the next ``up`` or ``down`` kills
                    the remaining helpers
==================  ==========================================================================

Machines of the local provider are not parts. They exit when ``stack.lock`` has been free for a
while, so they survive a quick restart of the stack.

``home``             files of a stack, and ``stack.json``, the published state
``layout``           names of parts, ports, URLs and secrets
``parts``            commands, dependencies and readiness of the parts
``child``            the process of a part
``cleanup``          removal of machines and remaining processes
``supervisor``       the main loop
``control``          up and down, for other processes
"""

from vcasgd.stack.control import (
    ForegroundStack,
    down,
    environment,
    is_running,
    missing_libraries,
    require_libraries,
    running,
    up,
)
from vcasgd.stack.home import PartState, StackHome, StackPhase, StackState
from vcasgd.stack.parts import PARTS

__all__ = [
    "PARTS",
    "ForegroundStack",
    "PartState",
    "StackHome",
    "StackPhase",
    "StackState",
    "down",
    "environment",
    "is_running",
    "missing_libraries",
    "require_libraries",
    "running",
    "up",
]
