"""Write tables and plots of the outcomes of ``run.py`` to ``benchmarks/results/cifar10.md``.

A table goes between ``<!-- rows: GROUP -->`` and ``<!-- end -->``. A table with the best row of
each rule goes between ``<!-- best: GROUP -->`` and ``<!-- end -->``. The text around them is kept.
"""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("svg")
from experiment import Row, read_rows
from matplotlib import pyplot as plt

from run import read_runs

DOCUMENT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "cifar10.md"
#: Makes plots reproducible byte by byte.
STYLE = {"svg.hashsalt": "vcasgd", "svg.fonttype": "none", "font.size": 9, "figure.figsize": (7, 4)}

Runs = list[tuple[Row, list[dict[str, Any]]]]


def main() -> None:
    rows = [(row, runs) for row in read_rows().values() if (runs := read_runs(row))]
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(
        re.sub(
            r"(<!-- (rows|best): ([\w-]+) -->\n).*?(<!-- end -->)",
            lambda match: match[1] + TABLES[match[2]](match[3], rows) + match[4],
            text,
            flags=re.DOTALL,
        )
    )
    with plt.rc_context(STYLE):
        for group in ("claims", "alpha", "workers"):
            _plot(group, rows, "samples")
        _plot("workers", rows, "seconds")


def _table(group: str, rows: Runs) -> str:
    lines = [
        "| row | what | accuracy, % | seeds | staleness | pushed, MB | machines lost |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, runs in rows:
        if row.group == group:
            cells = [
                f"`{row.name}`",
                row.about,
                _accuracy(runs),
                str(len(runs)),
                f"{mean(run['staleness_mean'] for run in runs):.1f}",
                f"{mean(run['bytes_pushed'] for run in runs) / 1e6:.0f}",
                f"{mean(run['machines_lost'] for run in runs):.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _best(group: str, rows: Runs) -> str:
    of_rule: dict[str, Runs] = {}
    for row, runs in rows:
        if row.group == group:
            of_rule.setdefault(row.update["rule"], []).append((row, runs))
    ranked = [sorted(each, key=_final, reverse=True) for each in of_rule.values()]
    lines = [
        "| rule | at its best | accuracy, % | its other settings |",
        "| --- | --- | --- | --- |",
    ]
    for best, *others in sorted(ranked, key=lambda each: _final(each[0]), reverse=True):
        rest = ", ".join(f"{_final(each):.2f}" for each in others)
        row = best[0]
        lines.append(f"| `{row.update['rule']}` | {row.about} | {_final(best):.2f} | {rest} |")
    return "\n".join(lines) + "\n"


TABLES = {"rows": _table, "best": _best}


def _final(entry: tuple[Row, list[dict[str, Any]]]) -> float:
    """Return the final accuracy in percent, the mean over all seeds."""
    return mean(100 * run["points"][-1]["metrics"]["accuracy"] for run in entry[1])


def _accuracy(runs: list[dict[str, Any]]) -> str:
    accuracies = [100 * run["points"][-1]["metrics"]["accuracy"] for run in runs]
    if len(accuracies) == 1:
        return f"{accuracies[0]:.2f}"
    return f"**{mean(accuracies):.2f}** ({min(accuracies):.2f} – {max(accuracies):.2f})"


def _plot(group: str, rows: Runs, axis: str) -> None:
    figure, axes = plt.subplots()
    chosen = [(row, runs) for row, runs in rows if row.group == group]
    for (row, runs), line in zip(chosen, cycle(["-", "--", ":", "-."]), strict=False):
        points = list(zip(*(run["points"] for run in runs), strict=True))
        axes.plot(
            [mean(point[axis] for point in each) for each in points],
            [mean(100 * point["metrics"]["accuracy"] for point in each) for each in points],
            line,
            label=row.name,
        )
    axes.set_xlabel("samples trained" if axis == "samples" else "seconds, simulated")
    axes.set_ylabel("validation accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    name = f"cifar10-{group}-{axis}.svg"
    figure.savefig(DOCUMENT.parent / name, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
