"""The servers behind everything, as the API shows them. Bytes, seconds, Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from vcasgd.store.gauges import ServerGauges


class ServerGaugesView(BaseModel):
    """What a server says of itself; `null`: not told. `memory_limit_bytes`: `null` also where
    there is none. `unreplicated_since`: `null` while its replicas, if it has any, are there."""

    model_config = ConfigDict(from_attributes=True)

    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    operations_per_second: float | None = None
    replicas: int | None = None
    unreplicated_since: float | None = None


class NodeView(ServerGaugesView):
    """A store node: its tensors server, and the parameter server beside it. By job: `versions` of
    the model, `queued` updates that wait, `publications` since the server's start. `at`: of its
    last heartbeat."""

    node: str
    at: float | None = None
    pid: int | None = None
    token: int | None = None
    versions: dict[str, int] = {}
    publications: dict[str, int] = {}
    publications_per_second: float | None = None
    queued: dict[str, int] = {}

    @classmethod
    def of(cls, node: str, beat: Mapping[str, Any]) -> NodeView:
        since = (beat.get("unreplicated") or {}).get("tensors")
        return cls.model_validate({**beat, "node": node, "unreplicated_since": since})


class StoreView(BaseModel):
    """All servers that hold something."""

    nodes: list[NodeView]
    ledger: ServerGaugesView

    @classmethod
    def of(cls, beats: Mapping[str, Mapping[str, Any]], ledger: ServerGauges) -> StoreView:
        nodes = [NodeView.of(node, beat) for node, beat in sorted(beats.items())]
        lost = [(beat.get("unreplicated") or {}).get("ledger") for beat in beats.values()]
        view = ServerGaugesView.model_validate(ledger)
        # each parameter server writes there, and knows what its own writes came to
        view.unreplicated_since = min((at for at in lost if at is not None), default=None)
        return cls(nodes=nodes, ledger=view)
