"""The live view of a job: sparklines, marks for lost machines, and the remaining time."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from vcasgd.cli.progress import MAX_BARS, LiveView, mark, sparkline
from vcasgd.cli.watch import JobStatus
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.schemas.history import EventRow
from vcasgd.schemas.jobs import JobView, ProgressView, TotalsView
from vcasgd.spec.job import JobSpec, JobState


def event(kind: str, text: str = "", at: float = 0.0) -> EventRow:
    return EventRow(id=f"{at}-0", at=at, kind=kind, text=text, details={})


def job() -> JobView:
    spec = JobSpec(name="digits", task="a:B", epochs=10, subtasks_per_epoch=10)
    progress = ProgressView(
        epochs=10, finished_epochs=3, subtasks_total=100, samples_expected=1000,
        samples_applied=300, samples_repeated=0, samples_lost=None, fraction=0.3,
    )  # fmt: skip
    return JobView(
        id="digits-abc234", name="digits", state=JobState.RUNNING, reason=None, traceback=None,
        created_at=0.0, started_at=0.0, ended_at=None, spec=spec, progress=progress,
        totals=TotalsView(updates=30, staleness_mean=0.5, staleness_max=2), evaluations=[],
        best_accuracy=None, version=30, model=None, package="", evictions=0, kills=0,
    )  # fmt: skip


def status(workers: int, *events: EventRow) -> JobStatus:
    rows = [WorkerRow(name=f"w-{each}", job="j", doing="training") for each in range(workers)]
    return JobStatus(job(), rows, list(events), 1.0, 60.0)


def shown(*statuses: JobStatus) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=60)
    view = LiveView(console)
    for each in statuses:
        view.show(each)
    with console.capture() as capture:
        console.print(view._picture(statuses[-1]))
    return capture.get()


def test_lost_machine_is_marked_below_its_bar() -> None:
    killed = event("worker-killed", "local-2 was lost without a notice")

    lines = shown(status(4), status(4), status(3, killed), status(4)).splitlines()

    (bars,) = [at for at, line in enumerate(lines) if "workers" in line and "█" in line]
    plain = [Text.from_ansi(line).plain for line in lines]
    marks = plain[bars + 1]
    assert plain[bars].rindex("▆") == marks.index("▲")
    assert marks.count("▲") == 1
    assert "31m▲" in lines[bars + 1], "the mark is red"


def test_losses_stay_visible_among_many_events() -> None:
    lost = event("worker-evicted", "local-1 was lost after a notice")
    others = [event("worker-started", f"local-{number} works on the job") for number in range(50)]

    text = shown(status(2, lost), status(2, *others))

    assert "worker-evicted: local-1 was lost after a notice" in text
    assert "local-49 works on" in text
    assert "local-3 works on" not in text


def test_mark_shows_the_worst_loss() -> None:
    notice, killed = event("eviction-notice"), event("worker-killed")

    assert (mark([notice, killed]).plain, mark([notice, killed]).style) == ("▲", "red")
    assert (mark([notice]).plain, mark([notice]).style) == ("△", "yellow")
    assert mark([event("checkpoint")]).plain == " "


def test_sparkline_scales_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 7]) == "▁█"
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert sparkline([-1.0, 0.0, 1.0]) == "▁▅█"


def test_sparkline_accepts_a_lowest_value() -> None:
    assert sparkline([4, 8], lowest=0) == "▅█"
    assert sparkline([3, 3], lowest=0) == "██"


def test_sparkline_of_equal_values_is_flat() -> None:
    assert sparkline([2, 2, 2]) == "▁▁▁"
    assert sparkline([0, 0], lowest=0) == "▁▁"


def test_sparkline_shows_only_the_newest_values() -> None:
    line = sparkline([*[100] * 50, *range(MAX_BARS)])

    assert (len(line), line[0], line[-1]) == (MAX_BARS, "▁", "█")
