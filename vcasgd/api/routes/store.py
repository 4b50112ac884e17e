"""The servers that hold models, updates and the ledger."""

from __future__ import annotations

from fastapi import APIRouter

from vcasgd.api.services import Here
from vcasgd.api.store_views import StoreView
from vcasgd.store.gauges import read_gauges

router = APIRouter(tags=["store"])


@router.get("/store")
def get_store(here: Here) -> StoreView:
    """Versions, queues, memory, load and replication, as parameter servers told last."""
    return StoreView.of(here.servers.all(), read_gauges(here.ledger))
