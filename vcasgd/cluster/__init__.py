"""The only package that imports Ray.

Ray keeps the list of machines, places a process on each that runs its workers
(:mod:`vcasgd.cluster.driver`), and passes orders to it. Tensors and control data go through the
Redis servers. So without a head, only new workers can't be started.

Failures and their effects:

* **Head** (Ray's control service and the processes beside it): nodes and workers continue for
  :data:`~vcasgd.cluster.commands.OUTAGE_SECONDS`. A head restarted with the same command reads its
  state from the ledger and finds them. A driver does not survive the head: see
  :class:`~vcasgd.cluster.driver.Cluster`.
* **Ledger**: the head exits within three heartbeats and about two seconds. Restart the ledger,
  then the head.
* **Node**: reported dead after four heartbeats if its process was killed, and after nine if the
  machine no longer answers. Its workers end within three seconds of the node in any case.
* **Runner**: its workers end with it. The next round starts another one.

Anyone who can connect to Ray's ports can run code as its user. The ports listen on all interfaces
without encryption: pass the same ``token`` to every command, and protect them with a firewall.
"""
