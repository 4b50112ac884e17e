"""Samples in the model over time, one picture for each fault. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from entrants import ENTRANTS
from faults import COLUMNS
from outcomes import Row

#: Makes plots reproducible byte by byte.
STYLE = {"svg.hashsalt": "vcasgd", "svg.fonttype": "none", "font.size": 9, "figure.figsize": (7, 4)}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write ``<fault>.svg`` files into a folder, and return their paths."""
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, column in COLUMNS.items():
            chosen = [row for row in rows if row["column"] == name and "curve" in row]
            if chosen:
                paths.append(folder / f"{name}.svg")
                _draw(chosen, column.title, paths[-1])
    return paths


def _draw(rows: Sequence[Row], title: str, path: Path) -> None:
    figure, axes = plt.subplots()
    labelled = set()
    for nth, (name, entrant) in enumerate(ENTRANTS.items()):
        for row in rows:
            if row["contender"] != name:
                continue
            axes.plot(
                [at for at, _ in row["curve"]],
                [samples / 1000 for _, samples in row["curve"]],
                color=f"C{nth}",
                linewidth=1.0,
                label=None if name in labelled else entrant.title,
            )
            labelled.add(name)
    axes.set_title(title)
    axes.set_xlabel("seconds")
    axes.set_ylabel("thousand samples in the model")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
