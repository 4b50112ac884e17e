"""The numbers of a measurement: what is printed, and as JSON what programs read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from vcasgd.bench.copies import copies, copies_per_update
from vcasgd.bench.gauges import Gauge
from vcasgd.bench.loopback import Loopback

_MB = 1e6


@dataclass(frozen=True)
class ProcessFigures:
    """Of one process. ``…_models``: above its baseline, in sizes of the model."""

    baseline_mb: float
    resident_min_mb: float
    resident_max_mb: float
    resident_max_models: float
    cpu_seconds: float
    #: of a soak only
    slope_mb_per_minute: float | None = None
    first_mb: float | None = None
    last_mb: float | None = None

    @classmethod
    def of(cls, gauge: Gauge, model_bytes: int, *, soak: bool) -> ProcessFigures:
        figures = cls(
            baseline_mb=round(gauge.baseline / _MB, 1),
            resident_min_mb=round(gauge.smallest / _MB, 1),
            resident_max_mb=round(gauge.largest / _MB, 1),
            resident_max_models=round((gauge.largest - gauge.baseline) / model_bytes, 2),
            cpu_seconds=round(gauge.cpu_seconds, 2),
        )
        if not soak:
            return figures
        return replace(
            figures,
            slope_mb_per_minute=round(gauge.slope() * 60 / _MB, 3),
            first_mb=round(gauge.samples[0][1] / _MB, 1),
            last_mb=round(gauge.samples[-1][1] / _MB, 1),
        )


@dataclass(frozen=True)
class Figures:
    """One measurement. ``loopback``: the raw stream, before and after."""

    size_mb: int
    workers: int
    codec: str
    store_nodes: int
    worker_socket: str
    seconds: float
    updates: int
    updates_per_s: float
    publishes_per_s: float
    fetches_per_s: float
    payload_bytes: int
    fetch_bytes: int
    model_bytes: int
    p50_push_to_applied_ms: float | None
    p99_push_to_applied_ms: float | None
    loopback_bytes_per_update: float
    rejected: int
    processes: dict[str, ProcessFigures]
    server: str
    server_version: str
    tensors_peak_mb: float
    refused_for_want_of_room: int
    loopback: tuple[Loopback, ...] = ()

    def against(self, loopback: list[Loopback]) -> Figures:
        return replace(self, loopback=tuple(loopback))

    @property
    def update_gb_per_s(self) -> float:
        """What workers push."""
        return self.updates_per_s * self.payload_bytes / 1e9

    @property
    def exchanged_gb_per_s(self) -> float:
        """What workers push and fetch."""
        return self.update_gb_per_s + self.fetches_per_s * self.fetch_bytes / 1e9

    @property
    def loopback_gb_per_s(self) -> float:
        # the best one: whatever else ran meanwhile must not flatter us
        return max(each.piece for each in self.loopback) / 1e9

    @property
    def loopback_model_gb_per_s(self) -> float:
        """Through memory of the model's size."""
        return max(each.model for each in self.loopback) / 1e9

    @property
    def wire_fraction(self) -> float:
        return self.exchanged_gb_per_s / self.loopback_gb_per_s

    @property
    def wire_fraction_model(self) -> float:
        return self.exchanged_gb_per_s / self.loopback_model_gb_per_s

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        value = asdict(self)
        del value["loopback"]
        value["loopback_gb_per_s_each"] = [each.piece / 1e9 for each in self.loopback]
        value["loopback_model_gb_per_s_each"] = [each.model / 1e9 for each in self.loopback]
        derived = {
            name: getattr(self, name)
            for name in ("update_gb_per_s", "exchanged_gb_per_s", "loopback_gb_per_s",
                         "loopback_model_gb_per_s", "wire_fraction", "wire_fraction_model")
        }  # fmt: skip
        return value | derived | {"copies_per_update": copies_per_update(self.codec)}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Name and value of what is not about a single process, for people."""
        yield "model", f"{self.size_mb} MiB, float32; updates as {self.codec}"
        yield "tensors server", f"{self.server} {self.server_version}"
        yield "store nodes", f"{self.store_nodes}"
        yield "workers' connections", self.worker_socket
        yield (
            "measured",
            f"{self.updates} updates, {self.workers} workers, {self.seconds:.1f} s",
        )
        yield "updates applied and published", f"{self.updates_per_s:.2f} /s"
        yield "publications", f"{self.publishes_per_s:.2f} /s"
        yield "fetches", f"{self.fetches_per_s:.2f} /s"
        yield "pushed", f"{self.update_gb_per_s:.3f} GB/s"
        yield "pushed and fetched", f"{self.exchanged_gb_per_s:.3f} GB/s"
        yield "loopback, from the cache", _loopback([one.piece for one in self.loopback])
        yield "part of that", f"{self.wire_fraction:.3f}"
        yield "loopback, memory of a model", _loopback([one.model for one in self.loopback])
        yield "part of that", f"{self.wire_fraction_model:.3f}"
        models = self.loopback_bytes_per_update / self.model_bytes
        yield "crossed the loopback", f"{models:.2f} models for each update"
        yield "push to applied, median", _milliseconds(self.p50_push_to_applied_ms)
        yield "push to applied, 99 %", _milliseconds(self.p99_push_to_applied_ms)
        yield "copies of an update", _copies(self.codec)
        yield "peak memory of the tensors server", f"{self.tensors_peak_mb:.0f} MB"
        yield "refused for want of room", f"{self.refused_for_want_of_room}"


def _milliseconds(value: float | None) -> str:
    return "none seen" if value is None else f"{value:.1f} ms"


def _loopback(each: list[float]) -> str:
    shown = " and ".join(f"{one / 1e9:.2f}" for one in each)
    return f"{max(each) / 1e9:.2f} GB/s (before and after: {shown})"


def _copies(codec: str) -> str:
    kernel = sum(copy.kernel for _, copy in copies(codec))
    return f"{copies_per_update(codec)}, of which sockets make {kernel}"
