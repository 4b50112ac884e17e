"""The only package that imports Ray.

Ray keeps the list of machines, places workers on them, and hosts the workers' processes. Tensors
and control data go through the Redis servers. So without a head, only new workers can't be placed.

Failures and their effects:

* **Head** (Ray's control service and the processes beside it): nodes and workers continue for
  :data:`OUTAGE_SECONDS`. A head restarted with the same command reads its state from the ledger
  and finds them. A driver does not survive the head: see :class:`Cluster`.
* **Ledger**: the head exits within three heartbeats and about two seconds. Restart the ledger,
  then the head.
* **Node**: reported dead after four heartbeats if its process was killed, and after nine if the
  machine no longer answers. Its worker ends within three seconds of the node in any case.

Anyone who can connect to Ray's ports can run code as its user. The ports listen on all interfaces
without encryption: pass the same ``token`` to every command, and protect them with a firewall.
"""

from vcasgd.cluster.commands import (
    MACHINE_LABEL,
    OUTAGE_SECONDS,
    TEMP_DIR_BYTES,
    Command,
    for_workers,
    head_command,
    node_command,
)
from vcasgd.cluster.driver import PING_SECONDS, ActorState, Cluster, Node, WorkerState

__all__ = [
    "MACHINE_LABEL",
    "OUTAGE_SECONDS",
    "PING_SECONDS",
    "TEMP_DIR_BYTES",
    "ActorState",
    "Cluster",
    "Command",
    "Node",
    "WorkerState",
    "for_workers",
    "head_command",
    "node_command",
]
