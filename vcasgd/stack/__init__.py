"""Everything on one machine, supervised: what ``vcasgd up`` starts.

A *guardian* process forks the *supervisor*, which starts the parts in order, restarts those
that die, and stops them in reverse. Nothing outlives it by accident:

==================  ================================================================
killed with −9      what follows
==================  ================================================================
a part              its helpers are killed, it is started again after a growing pause
the supervisor      the kernel kills the parts, the guardian kills their helpers
the guardian        the supervisor stops everything in order
all of them         the parts die with the supervisor; the next ``up`` or ``down``
                    kills what helpers are left
==================  ================================================================

Machines of the local provider are not parts: they die when ``stack.lock`` is free for a
while, so that they survive a quick restart.

``home``     the files of a stack
``state``    ``stack.json``, what others see of it
``names``    of parts, several of a kind where there are several store nodes
``layout``   ports, URLs and secrets
``parts``    what the parts are
``child``    the process of a part
``leftovers``  what is cleared away beside them
``supervisor``  the loop
``control``  up and down, as seen from outside
"""

from vcasgd.stack.control import ForegroundStack, down, environment, is_running, running, up
from vcasgd.stack.home import StackHome
from vcasgd.stack.parts import PARTS
from vcasgd.stack.state import PartState, StackPhase, StackState

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
    "running",
    "up",
]
