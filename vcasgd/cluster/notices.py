"""Eviction notices that machines publish through Ray, whether or not a worker runs on them.

Some clouds send a notice only to the machine itself. A machine of Ray has no access to the ledger,
so it writes the notice to the key-value store of Ray's control service, where the driver reads it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import Any

from vcasgd.cluster import tls
from vcasgd.fleet.machine.notices import Notice

#: Namespace of Ray's key-value store. Keys are the ids of machines.
_NAMESPACE = b"vcasgd-notices"
#: Seconds after which a machine publishes a notice again that still holds.
PUBLISH_SECONDS = 600.0
#: Seconds after which a notice is deleted; the machine is gone long before, or publishes it again.
#: Generous, because the clocks of machines can differ.
_KEPT_SECONDS = 86_400.0


def publish(address: str, machine: str, notice: Notice) -> None:
    """Publish a notice from a machine that is not a driver. ``address``: of the head.

    Raises errors of Ray while its control service is unavailable.
    """
    # Before Ray is imported, because it then reads the environment.
    if os.environ.pop(tls.VARIABLE, None) == "1":
        tls.use(os.environ["RAY_AUTH_TOKEN"], tls.own_address(address))
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    row = json.dumps({**asdict(notice), "published_at": time.time()})
    GcsClient(address=address).internal_kv_put(machine.encode(), row.encode(), True, _NAMESPACE)


def published() -> dict[str, Notice]:
    """Return the notices by machine, and delete old ones. Call it in a driver."""
    from ray.experimental import internal_kv as store

    notices = {}
    for key in store._internal_kv_list(b"", namespace=_NAMESPACE):
        row: dict[str, Any] = json.loads(store._internal_kv_get(key, namespace=_NAMESPACE) or b"{}")
        if time.time() - row.pop("published_at", 0.0) > _KEPT_SECONDS:
            store._internal_kv_del(key, namespace=_NAMESPACE)
        else:
            notices[key.decode()] = Notice(**row)
    return notices
