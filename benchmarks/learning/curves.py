"""Curves of every seed over the epochs, as SVG, one file for each task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("svg")
from columns import COLUMNS, TASKS
from matplotlib import pyplot as plt
from rows import metric

if TYPE_CHECKING:
    from report import Cells

#: Makes plots reproducible byte by byte.
STYLE = {"svg.hashsalt": "vcasgd", "svg.fonttype": "none", "font.size": 9, "figure.figsize": (7, 4)}


def draw(cells: Cells, picture: Callable[[str], Path]) -> None:
    with plt.rc_context(STYLE):
        for task in TASKS:
            if any(key[0] == task for key in cells):
                _draw_task(cells, task, picture(task))


def _draw_task(cells: Cells, task: str, path: Path) -> None:
    figure, axes = plt.subplots()
    scale = 100 if metric(task) == "accuracy" else 1
    for nth, (name, column) in enumerate(COLUMNS.items()):
        cell = cells.get((task, name))
        for seed, row in enumerate(cell.rows if cell else ()):
            # A training that diverged may end with an evaluation without a value.
            points = [each for each in row["points"] if each["metrics"][metric(task)] is not None]
            axes.plot(
                [point["epoch"] for point in points],
                [scale * point["metrics"][metric(task)] for point in points],
                "--" if column.machines > 1 else "-",
                color="black" if name == "plain" else f"C{nth}",
                linewidth=1.0,
                label=None if seed else column.title,
            )
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation accuracy, %" if scale == 100 else "validation loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
