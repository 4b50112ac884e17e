"""The workers that each machine has to run, on nodes of Ray and on machines that joined."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import WORKER_ORDERS

log = logging.getLogger(__name__)


class WorkerOrder(BaseModel):
    """A worker that a machine has to run. ``start`` differs for each start of its process."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    worker: str
    job: str
    start: str
    #: Environment of the process, which contains credentials.
    env: dict[str, str] = Field(repr=False)


_ROWS = TypeAdapter(list[WorkerOrder])


class WorkerOrders:
    """The orders in the ledger. Only the leading controller writes them.

    Methods raise :class:`~vcasgd.errors.StoreUnavailable`.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def all(self) -> dict[str, list[WorkerOrder]]:
        """Return the orders by machine."""
        rows = self._ledger.hgetall(WORKER_ORDERS)
        return {name.decode(): read_orders(name.decode(), row) for name, row in rows.items()}

    def set(self, orders: Mapping[str, Iterable[WorkerOrder]]) -> None:
        """Replace the orders of some machines."""
        if orders:
            rows = {machine: to_json(each) for machine, each in orders.items()}
            self._ledger.hset(WORKER_ORDERS, mapping=rows)

    def forget(self, *machines: str) -> None:
        """Delete the orders of machines that are lost."""
        if machines:
            self._ledger.hdel(WORKER_ORDERS, *machines)


def to_json(orders: Iterable[WorkerOrder]) -> str:
    """Return the JSON of a machine's orders."""
    return json.dumps([order.model_dump() for order in orders])


def read_orders(machine: str, row: bytes | None) -> list[WorkerOrder]:
    """Return the orders in the JSON of a machine; none if they can't be read."""
    try:
        return _ROWS.validate_json(row or b"[]")
    except ValidationError:
        log.warning("the orders of %s can't be read", machine)
        return []
