"""Machines that jobs can take, by pool, the cheapest first."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from vcasgd.fleet.plan.staff import worth
from vcasgd.fleet.providers.base import Machine

Item = TypeVar("Item")


class Stock(Generic[Item]):
    """Items on machines. Taking one costs the same however many there are.

    Machines that the cloud recommends leaving are not in stock.
    """

    def __init__(self, items: Iterable[tuple[Machine, Item]]) -> None:
        """Sort the items by the worth of their machines; equal ones keep their order."""
        self._queues: defaultdict[str, deque[tuple[Machine, Item]]] = defaultdict(deque)
        for one, item in sorted(items, key=lambda each: worth(each[0])):
            if one.advised_at is None:
                self._queues[one.pool].append((one, item))

    def take(self, pools: Sequence[str], limit: Callable[[str], float]) -> Item | None:
        """Remove and return the item on the best machine of several pools, or None.

        ``limit`` returns a pool's maximum price in USD per hour.
        """
        # The head of a queue is its cheapest machine, so no other one can be below the limit.
        heads = [
            queue
            for pool in pools
            if (queue := self._queues.get(pool)) and queue[0][0].price_per_hour <= limit(pool)
        ]
        if not heads:
            return None
        return min(heads, key=lambda queue: worth(queue[0][0])).popleft()[1]
