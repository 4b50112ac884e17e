"""Results of a measurement, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.measure.gauges import Gauge
from benchmarks.measure.loopback import Loopback

_MB = 1e6


@dataclass(frozen=True)
class ProcessFigures:
    """Memory and processor time of one process.

    ``resident_max_models`` is the memory above the baseline, in sizes of the model.
    """

    baseline_mb: float
    resident_min_mb: float
    resident_max_mb: float
    resident_max_models: float
    cpu_seconds: float
    #: Measured in soak tests only.
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
    """One measurement, with the plain TCP stream measured before and after it."""

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
        """Return the bytes that workers push, in GB/s."""
        return self.updates_per_s * self.payload_bytes / 1e9

    @property
    def exchanged_gb_per_s(self) -> float:
        """Return the bytes that workers push and fetch, in GB/s."""
        return self.update_gb_per_s + self.fetches_per_s * self.fetch_bytes / 1e9

    @property
    def loopback_gb_per_s(self) -> float:
        # The best value: other processes must not make the product look better.
        return max(each.piece for each in self.loopback) / 1e9

    @property
    def loopback_model_gb_per_s(self) -> float:
        """Return the stream's throughput through memory of the model's size, in GB/s."""
        return max(each.model for each in self.loopback) / 1e9

    @property
    def wire_fraction(self) -> float:
        return self.exchanged_gb_per_s / self.loopback_gb_per_s

    @property
    def wire_fraction_model(self) -> float:
        return self.exchanged_gb_per_s / self.loopback_model_gb_per_s

    def to_dict(self) -> dict[str, Any]:
        """Return the value that ``--json`` prints."""
        value = asdict(self)
        del value["loopback"]
        value["loopback_gb_per_s_each"] = [each.piece / 1e9 for each in self.loopback]
        value["loopback_model_gb_per_s_each"] = [each.model / 1e9 for each in self.loopback]
        derived = {
            name: getattr(self, name)
            for name in ("update_gb_per_s", "exchanged_gb_per_s", "loopback_gb_per_s",
                         "loopback_model_gb_per_s", "wire_fraction", "wire_fraction_model")
        }  # fmt: skip
        return value | derived

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield names and values of all results that do not belong to one process."""
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
        yield "loopback, cached memory", _loopback([one.piece for one in self.loopback])
        yield "fraction of that", f"{self.wire_fraction:.3f}"
        yield "loopback, model-sized memory", _loopback([one.model for one in self.loopback])
        yield "fraction of that", f"{self.wire_fraction_model:.3f}"
        models = self.loopback_bytes_per_update / self.model_bytes
        yield "loopback traffic", f"{models:.2f} models per update"
        yield "push to applied, median", _milliseconds(self.p50_push_to_applied_ms)
        yield "push to applied, 99 %", _milliseconds(self.p99_push_to_applied_ms)
        yield "peak memory, tensors server", f"{self.tensors_peak_mb:.0f} MB"
        yield "refused, out of memory", f"{self.refused_for_want_of_room}"


def _milliseconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f} ms"


def _loopback(each: list[float]) -> str:
    shown = " and ".join(f"{one / 1e9:.2f}" for one in each)
    return f"{max(each) / 1e9:.2f} GB/s (before and after: {shown})"
