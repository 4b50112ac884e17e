"""Ray, and all that the rest of the package knows of it.

Ray keeps the list of machines, places workers on each and hosts their processes. Tensors
and control data go through the two Redis servers, so a dead head costs nothing but the
ability to place new workers until it is back.

What dies, and what follows:

* **Head** (the control service and what is beside it): nodes and workers go on for
  :data:`OUTAGE_SECONDS`. Started again with the same command it reads its state from the
  ledger and finds them. A driver does not survive it: see :class:`Cluster`.
* **Ledger**: the head ends itself within three heartbeats and a second or two. Start the
  ledger, then the head.
* **Node**: known to be dead after four heartbeats if its process was killed, after nine if
  the machine fell silent. Its worker ends within three seconds of it in any case.

Whoever reaches Ray's ports can run code as its user. They listen on all interfaces and
speak unencrypted: give every command the same ``token``, and keep a firewall in front.
"""

from vcasgd.cluster.commands import (
    INSTANCE_LABEL,
    OUTAGE_SECONDS,
    TEMP_DIR_BYTES,
    Command,
    head_command,
    node_command,
)
from vcasgd.cluster.driver import PING_SECONDS, ActorState, Cluster, Node, WorkerState

__all__ = [
    "INSTANCE_LABEL",
    "OUTAGE_SECONDS",
    "PING_SECONDS",
    "TEMP_DIR_BYTES",
    "ActorState",
    "Cluster",
    "Command",
    "Node",
    "WorkerState",
    "head_command",
    "node_command",
]
