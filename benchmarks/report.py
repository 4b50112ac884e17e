"""Report of the results, as Markdown and as JSON."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contenders import OURS, Contender

#: Details of the runs of vcasgd: key, title, format.
DETAILS = (
    ("exchanged_gb_per_s", "pushed and fetched, GB/s", "{:.2f}"),
    ("loopback_gb_per_s", "loopback from the cache, GB/s", "{:.2f}"),
    ("wire_fraction", "fraction of that", "{:.2f}"),
    ("loopback_model_gb_per_s", "loopback through memory of a model, GB/s", "{:.2f}"),
    ("wire_fraction_model", "fraction of that", "{:.2f}"),
    ("publishes_per_s", "publications /s", "{:.1f}"),
    ("fetches_per_s", "fetches /s", "{:.1f}"),
    ("p50_push_to_applied_ms", "push to applied, median, ms", "{:.0f}"),
    ("p99_push_to_applied_ms", "push to applied, 99 %, ms", "{:.0f}"),
    ("tensors_peak_mb", "tensors server, peak MB", "{:.0f}"),
)


@dataclass(frozen=True)
class Report:
    """All results: contender's name → MiB → one dictionary per run."""

    facts: dict[str, str]
    started_at: float
    minutes: float
    command: str
    contenders: list[Contender]
    results: dict[str, dict[int, list[dict[str, Any]]]]

    @property
    def sizes(self) -> list[int]:
        return sorted({size for sizes in self.results.values() for size in sizes})

    def rates(self, name: str, size: int) -> list[float]:
        """Return updates per second of the runs without errors."""
        runs = self.results.get(name, {}).get(size, [])
        return [run["updates_per_s"] for run in runs if "updates_per_s" in run]

    def median(self, name: str, size: int) -> float | None:
        rates = self.rates(name, size)
        return statistics.median(rates) if rates else None

    def error(self, name: str, size: int) -> str:
        runs = self.results.get(name, {}).get(size, [])
        return next((run["error"] for run in runs if "error" in run), "")


def write(path: Path, report: Report) -> None:
    """Write ``<path>.md`` and ``<path>.json``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {
        "started_at": report.started_at,
        "minutes": round(report.minutes, 1),
        "command": report.command,
        "machine": report.facts,
        "results": report.results,
    }
    path.with_suffix(".json").write_text(json.dumps(value, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(_document(report)) + "\n")


def _document(report: Report) -> Iterator[str]:
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.started_at))
    yield "# The store against its peers"
    yield ""
    yield (
        f"Written by `make bench` (`{report.command}`) on {date}, in {report.minutes:.1f} minutes."
        " [The method](method.md) explains what is counted. Values are medians; the systems took"
        " turns."
    )
    yield ""
    yield from _table(["", ""], ([name, value] for name, value in report.facts.items()))
    for size in report.sizes:
        yield f"## {size} MiB, 2 workers"
        yield ""
        yield from _comparison(report, size)
        yield from _details(report, size)
    yield "## Versions and commands"
    yield ""
    yield from _versions(report)


def _comparison(report: Report, size: int) -> Iterator[str]:
    ours = report.median(OURS, size)
    rows = []
    for one in report.contenders:
        rates, median = report.rates(one.name, size), report.median(one.name, size)
        if median is None:
            rows.append([one.title, "–", "", "", "", report.error(one.name, size)])
            continue
        ratio = f"{ours / median:.2f} ×" if ours and not one.information else ""
        runs = report.results[one.name][size]
        worked = f"{len(rates)}" if len(rates) == len(runs) else f"{len(rates)} of {len(runs)}"
        spread = f"{min(rates):.2f} – {max(rates):.2f} ({worked})"
        crossed = _crossed(runs, size)
        rows.append([one.title, f"{median:.2f}", spread, ratio, crossed, one.counted])
    heads = ["", "updates/s", "range (runs)", "vcasgd float32 is",
             "models over the loopback per update", "counted"]  # fmt: skip
    yield from _table(heads, rows)


def _crossed(runs: list[dict[str, Any]], size_mb: int) -> str:
    models = [
        run["loopback_bytes_per_update"] / (size_mb << 20) for run in runs if "error" not in run
    ]
    return f"{statistics.median(models):.2f}"


def _details(report: Report, size: int) -> Iterator[str]:
    ours = [
        (one, [run for run in report.results[one.name].get(size, []) if "error" not in run])
        for one in report.contenders
        if not one.environment
    ]
    ours = [(one, runs) for one, runs in ours if runs]
    if not ours:
        return
    rows = [
        [title, *(_median_of(runs, key, shape) for _, runs in ours)]
        for key, title, shape in DETAILS
    ]
    names = list(ours[0][1][0]["processes"])
    for title, cell in (("peak resident memory", _memory), ("processor seconds", _processor)):
        rows += [[f"{name}: {title}", *(cell(runs, name) for _, runs in ours)] for name in names]
    yield from _table(["", *(one.title for one, _ in ours)], rows)


def _median_of(runs: list[dict[str, Any]], key: str, shape: str) -> str:
    values = [run[key] for run in runs if run[key] is not None]
    return shape.format(statistics.median(values)) if values else "–"


def _memory(runs: list[dict[str, Any]], name: str) -> str:
    most = max((run["processes"][name] for run in runs), key=lambda each: each["resident_max_mb"])
    return (
        f"{most['resident_max_mb']:.0f} MB: {most['baseline_mb']:.0f} before the job"
        f" + {most['resident_max_models']:.2f} models"
    )


def _processor(runs: list[dict[str, Any]], name: str) -> str:
    seconds = statistics.median(run["processes"][name]["cpu_seconds"] for run in runs)
    return f"{seconds:.2f} of {statistics.median(run['seconds'] for run in runs):.1f}"


def _versions(report: Report) -> Iterator[str]:
    rows = []
    for one in report.contenders:
        runs = [run for size in report.sizes for run in report.results[one.name].get(size, [])]
        run = next((run for run in runs if "error" not in run), {})
        if not one.environment:
            versions = {str(run.get("server", "")): str(run.get("server_version", ""))}
        else:
            versions = run.get("versions", {})
        argv = " ".join(one.argv(report.sizes[-1], 6.0)[1:])
        command = argv.replace(str(Path(__file__).resolve().parent.parent) + "/", "")
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        rows.append([one.title, text, f"`{command}`"])
    yield from _table(["", "versions", "command"], rows)


def _table(heads: list[str], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
