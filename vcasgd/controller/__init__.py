"""The controller: observes machines and jobs, decides, and acts.

``main``        the process: a fleet loop and a job loop
``leadership``  the lease that decides which of several controllers acts
``jobs``        the life, the checkpoints, and the tuning of each job
``fleet``       the machines and the workers on them

The controller holds a lease in the ledger, so that a second one can stand by. After a restart it
finds its machines by their tag, its workers through Ray, and its jobs in the ledger. The process
ends when Ray's head is lost, as :class:`~vcasgd.cluster.driver.Cluster` requires, and its
supervisor restarts it. Jobs continue meanwhile.
"""

from __future__ import annotations

import signal

#: Signal that ends a controller because its whole stack stops. Workers first hand in what they
#: have; after SIGTERM they train on, because another controller follows.
STACK_STOPS = signal.SIGUSR1
#: Most seconds that workers have to hand in.
MAX_HAND_IN_SECONDS = 60.0
