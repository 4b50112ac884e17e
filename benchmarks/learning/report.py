"""Write the tables and curves of ``run.py`` to the pages ``DOCUMENTS``.

Tables go between ``<!-- learning: NAME -->`` and ``<!-- end -->``; the text around them is kept.
NAME is ``overview``, ``details``, ``costs``, ``real``, or ``stability``. Without matplotlib, the
curves stay as they are.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from columns import COLUMNS, TASKS, Run
from rows import Row, best_rate, digest, metric, read

ROOT = Path(__file__).resolve().parents[2]
#: The summary for users, and the figures behind it.
DOCUMENTS = (ROOT / "docs" / "learning.md", ROOT / "benchmarks" / "results" / "learning.md")
#: Largest losses against the plain loop that are allowed, in percent, by number of workers. A
#: single worker does what the plain loop does, apart from rounding.
USUAL = {1: 0.1, 2: 0.5, 4: 0.5, 8: 1.0}
LIMITS = {"text": {1: 0.1, 2: 0.5, 4: 1.0, 8: 2.0}, "cifar10": {1: 0.1, 2: 0.3, 4: 0.5, 8: 1.0}}
#: Largest differences between the trace and the same workers without it, in percent.
TRACE_USUAL, TRACE_LIMITS = 0.5, {"cifar10": 0.3}
MET, MISSED = "✓", "✗"


@dataclass(frozen=True)
class Cell:
    """The rows of a task in a column, one for each seed."""

    task: str
    column: str
    rows: tuple[Row, ...]
    #: True if a row was measured with other code or settings.
    stale: bool = False

    @property
    def values(self) -> list[float]:
        """The task's metric; infinite or 0 where the training diverged."""
        worst = 0.0 if self.unit == "points" else float("inf")
        return [row["metrics"].get(metric(self.task), worst) for row in self.rows]

    @property
    def value(self) -> float:
        return mean(self.values)

    @property
    def unit(self) -> str:
        return "points" if metric(self.task) == "accuracy" else "%"

    def worse_than(self, other: Cell) -> float:
        """Return by how much this cell is worse: points of accuracy, or percent of a loss."""
        if self.unit == "points":
            return 100 * (other.value - self.value)
        return 100 * (self.value / other.value - 1)


@dataclass(frozen=True)
class Verdict:
    """A target that is met or missed, and the comparison in words."""

    met: bool
    text: str

    def __str__(self) -> str:
        return f"{self.text} {MET if self.met else MISSED}"


Cells = dict[tuple[str, str], Cell]


def cells(rows: dict[Run, Row], digest_of: Callable[[Run], str] | None = None) -> Cells:
    """Return the measured cells. Data parallelism counts at its best rate."""
    found: Cells = {}
    for task in TASKS:
        for column in COLUMNS:
            rate = best_rate(task, column, rows)
            runs = [run for run in rows if (run.task, run.column, run.rate) == (task, column, rate)]
            if runs:
                runs.sort(key=lambda run: run.seed)
                stale = any(digest_of and digest_of(run) != rows[run]["digest"] for run in runs)
                found[task, column] = Cell(task, column, tuple(rows[run] for run in runs), stale)
    return found


def verdicts(all_cells: Cells, task: str, column: str) -> list[Verdict]:
    """Return the targets of a cell, except for those whose other cell isn't measured yet."""
    cell, workers = all_cells[task, column], COLUMNS[column].workers
    if not workers:
        return []
    if COLUMNS[column].trace:
        limit = TRACE_LIMITS.get(task, TRACE_USUAL)
        same = all_cells.get((task, f"workers-{workers}"))
        return [_within(cell, same, limit)] if same else []
    found = []
    if plain := all_cells.get((task, "plain")):
        limit = LIMITS.get(task, USUAL)[workers]
        found.append(_at_most(cell, plain, limit))
    if parallel := all_cells.get((task, f"parallel-{workers}")):
        found.append(_at_most(cell, parallel, 0.0))
    return found


def _at_most(cell: Cell, other: Cell, limit: float) -> Verdict:
    worse = cell.worse_than(other)
    return Verdict(worse <= limit, f"{_compared(cell, worse, other)}, ≤ {limit:g}")


def _within(cell: Cell, other: Cell, limit: float) -> Verdict:
    worse = cell.worse_than(other)
    return Verdict(abs(worse) <= limit, f"{_compared(cell, worse, other)}, ± {limit:g}")


def _compared(cell: Cell, worse: float, other: Cell) -> str:
    word = "better" if worse < 0 else "worse"
    return f"{abs(worse):.2f} {cell.unit} {word} than {COLUMNS[other.column].title}"


# -- tables ------------------------------------------------------------------------------------


def picture(task: str) -> Path:
    return ROOT / "docs" / "images" / f"learning-{task}.svg"


def overview(all_cells: Cells) -> Iterator[str]:
    """Yield one line for each task: the means, with ✓ if all targets of a cell are met."""
    yield from _head(["task", *(column.title for column in COLUMNS.values())])
    for task in TASKS:
        if any(key[0] == task for key in all_cells):
            yield _line([f"`{task}`, {metric(task)}", *_overview_cells(all_cells, task)])
    checks = [check for key in all_cells for check in verdicts(all_cells, *key)]
    if checks:
        yield ""
        yield f"{sum(check.met for check in checks)} of {len(checks)} targets are met."
    if any(cell.stale for cell in all_cells.values()):
        yield ""
        yield "† measured with an older version of the code."


def _overview_cells(all_cells: Cells, task: str) -> Iterator[str]:
    for column in COLUMNS:
        cell = all_cells.get((task, column))
        if cell is None:
            yield "–"
            continue
        checks = verdicts(all_cells, task, column)
        mark = f" {MET if all(check.met for check in checks) else MISSED}" if checks else ""
        yield f"{_number(cell, cell.value)}{'†' if cell.stale else ''}{mark}"


def details(all_cells: Cells) -> Iterator[str]:
    """Yield a table for each task: every seed, and every target."""
    for task in TASKS:
        if not any(key[0] == task for key in all_cells):
            continue
        yield f"**`{task}`**, {metric(task)} on the validation data:"
        yield ""
        yield from _head(["column", "mean", "seeds", "staleness", "targets"])
        for (name, column), cell in all_cells.items():
            if name != task:
                continue
            seeds = ", ".join(_number(cell, value) for value in cell.values)
            checks = "; ".join(map(str, verdicts(all_cells, task, column)))
            yield _line([_title(cell), f"**{_number(cell, cell.value)}**", seeds,
                         _staleness(cell), checks])  # fmt: skip
        yield ""
        if picture(task).exists():
            path = f"../../docs/images/{picture(task).name}"
            yield f"![{metric(task)} of every seed over the epochs]({path})"
            yield ""


def costs(all_cells: Cells) -> Iterator[str]:
    """Yield what each asynchronous cell exchanged, means over the seeds."""
    yield from _head(["task", "column", "pushed, MB", "fetched, MB", "updates", "machines lost",
                      "simulated steps of time"])  # fmt: skip
    for cell in all_cells.values():
        if COLUMNS[cell.column].workers:
            yield _line([
                f"`{cell.task}`",
                COLUMNS[cell.column].title,
                f"{_mean(cell, 'bytes_pushed') / 1e6:.1f}",
                f"{_mean(cell, 'bytes_fetched') / 1e6:.1f}",
                f"{_mean(cell, 'updates'):.0f}",
                f"{_mean(cell, 'machines_lost'):.0f}",
                f"{_mean(cell, 'seconds'):.0f}",
            ])  # fmt: skip


def _mean(cell: Cell, name: str) -> float:
    return mean(row[name] for row in cell.rows)


def _title(cell: Cell) -> str:
    column, rate = COLUMNS[cell.column], cell.rows[0]["rate"]
    return f"{column.title}, rate × {rate:.3g}" if column.machines > 1 else column.title


def _staleness(cell: Cell) -> str:
    return f"{_mean(cell, 'staleness_mean'):.1f}" if COLUMNS[cell.column].workers else ""


def _number(cell: Cell, value: float) -> str:
    if value == float("inf") or (cell.unit == "points" and value == 0):
        return "diverged"
    return f"{100 * value:.2f} %" if cell.unit == "points" else f"{value:.4f}"


def _head(titles: list[str]) -> Iterator[str]:
    yield _line(titles)
    yield f"|{' --- |' * len(titles)}"


def _line(values: list[str]) -> str:
    return f"| {' | '.join(values)} |"


# -- the document ------------------------------------------------------------------------------


def fill(text: str, sections: dict[str, str]) -> str:
    """Replace the content of the sections' markers; unknown names stay as they are."""
    return re.sub(
        r"(<!-- learning: ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda match: (
            f"{match[1]}{sections[match[2]]}\n{match[3]}" if match[2] in sections else match[0]
        ),
        text,
        flags=re.DOTALL,
    )


def _joined(lines: Iterator[str]) -> str:
    text = "\n".join(lines).rstrip()
    # The head of a table is no result.
    return text if len(text.splitlines()) > 2 else "Not measured yet."


def main() -> None:
    import real
    import stability

    measured = cells(read(), digest)
    if importlib.util.find_spec("matplotlib"):
        from curves import draw

        draw(measured, picture)
    else:
        print("without matplotlib, the curves stay as they are")
    sections = {
        "overview": overview(measured),
        "details": details(measured),
        "costs": costs(measured),
        "real": real.table(real.read_rows()),
        "stability": stability.table(stability.read()),
    }
    texts = {name: _joined(lines) for name, lines in sections.items()}
    for document in DOCUMENTS:
        document.write_text(fill(document.read_text(), texts))


if __name__ == "__main__":
    main()
