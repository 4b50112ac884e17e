"""Report of the race, as Markdown; plots if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median

import machine
from entrants import ENTRANTS, OURS, Entrant, why_not
from faults import COLUMNS, SLOW, Column
from markdown import table
from outcomes import TARGET, Row, Workload

NOT_MEASURED = "not measured"
#: A difference of medians that single runs don't show.
AHEAD = 1.03
#: Share of the processors that other programs may use without harm.
MAX_OTHERS = 0.05

PAGE = """\
# The race: the same training under the same faults

    make race

{cnn.workers} machines on one computer train the convolutional network of `examples/mnist` on
MNIST, and [exchange the updates of a transformer](#a-transformer). Each machine computes
{cnn.batch} samples in {cnn.pace_ms:g} ms, because a step waits until then, and exchanges updates
every {cnn.sync_every} steps, or, with data parallelism, in every step. All contenders have the same
model, initial parameters, data, local optimizer, pace, and faults. Samples and faults count from
the moment when all machines have contributed to the model, for {cnn.seconds:g} s. A machine
that is lost is replaced at once, and one with a notice at its notice; its start takes the time that
the contender's own programs take. The contenders take turns.

vcasgd runs with `push_every: 20` and the batches of all machines as its batch; everything else is a
default. A second row also has the default `push_every`, so rounds are about as long as an exchange:
they cost samples per second, and each sample teaches more. Short trials came before: a
batch of one machine gave fewer samples per second. Except for torchft's timeouts, the peers had no
such trials. Their settings are in `benchmarks/race/workers` and are meant to recover quickly; those
of torchrun, Ray Train, hivemind, and DiLoCo are the first ones that worked, and others may be
better.

{machine}

{noise}
Killed processes of a contender may count as other programs, which is likely where only Ray Train's
runs with losses show many.

With slow links, each machine is a network of its own, and a program carries the packets between
them: {mbit:g} Mbit/s in each direction for a machine, and {delay_ms:g} ms from any machine or the
coordinator to another. The coordinator's link has a delay only. There, vcasgd's machines join its
stack by `vcasgd join`, over one TLS connection each.

## Samples per second

Samples that came into the model per second, and in parentheses as a share of what the machines
compute at their pace, from their first step to their end. What is missing to 1 is the cost of
exchanges, faults, and recovery. Medians of the runs, with their number if it isn't {runs}. A
negative rate means that the model started over, because all machines that had it were lost.

{throughput}

## Seconds to an accuracy of {target}

From the moment when the first machine began to train. The accuracy on the test images of snapshots,
one after each exchange and at most two per second. A run that didn't get there counts as infinite.
The time varies by several seconds from run to run, as [the table of each run](#each-run) shows, so
few runs don't separate contenders that are close.

{times}

## Each run

Of the runs above: samples per second and seconds to the target, run by run. Then, as medians,
megabytes per second over the loopback interface of the run's own network, or over the slow links;
the share of the processors that other programs used, where it was measured; the longest time
without a change of the model; and seconds from a loss to the replacement's first contribution,
negative if it came before the loss. Faults and repeated samples are those of all runs.

{details}

## A transformer

The exchange of a transformer with 33.6 million parameters, float32. Its steps take
{transformer.pace_ms:g} ms for {transformer.batch} samples, and compute nothing but a gradient of
noise and a step of SGD, so there is no loss to compare. Machines exchange updates every
{transformer.sync_every} steps, and a run is measured for {transformer.seconds:g} s. With slow
links, vcasgd runs with `update: {{codec: int2}}`, otherwise with its default encoding; what
encodings cost in quality is in [Learning](../../docs/learning.md#fewer-bytes).

{transformer_throughput}

{transformer_details}

## Where a peer is ahead

{ahead}

## Not measured

{left_out}

## Contenders

{contenders}
"""


def write_report(
    rows: Sequence[Row], workloads: Mapping[str, Workload], path: Path, runs: int = 3
) -> None:
    """Write the report of all runs of the workloads, and its plots."""
    chosen = {
        name: [row for row in rows if Workload(**row["workload"]) == workload]
        for name, workload in workloads.items()
    }
    pictures: list[Path] = []
    # Without matplotlib, the report has no plots.
    with suppress(ImportError):
        from race_curves import draw

        for name, group in chosen.items():
            pictures += draw(group, path.with_suffix("") / name)
    text = page(chosen, workloads, machine.describe(), runs)
    path.write_text(
        text + "".join(f"\n![]({each.relative_to(path.parent)})\n" for each in pictures)
    )


def page(
    rows: Mapping[str, Sequence[Row]],
    workloads: Mapping[str, Workload],
    facts: dict[str, str],
    runs: int,
) -> str:
    """Return the report; ``rows`` are those of each workload."""
    columns = list(COLUMNS.values())
    kept = {name: value for name, value in facts.items() if name not in ("load before", "vcasgd")}
    everything = [row for group in rows.values() for row in group]

    def throughput(group: Sequence[Row]) -> str:
        return _grid(group, columns, lambda cell: throughput_cell(cell, runs))

    def listed(lines: Callable[[Sequence[Row]], Iterable[str]]) -> str:
        return _bullets(f"{name}: {line}" for name in workloads for line in lines(rows[name]))

    return PAGE.format(
        **workloads,
        **asdict(SLOW),
        runs=runs,
        noise=noise(everything),
        target=TARGET,
        machine=table(("", ""), {**kept, **_of_runs(everything)}.items()),
        throughput=throughput(rows["cnn"]),
        times=_grid(rows["cnn"], columns, time_cell),
        details=_details(rows["cnn"]),
        transformer_throughput=throughput(rows["transformer"]),
        transformer_details=_details(rows["transformer"]),
        ahead=listed(peers_ahead) or "In no measured column.",
        left_out=listed(lambda group: left_out(group, runs)) or "Nothing.",
        contenders=table(
            ("contender", "what counts", "requirements"),
            ([one.title, one.counted, _requirements(one)] for one in ENTRANTS.values()),
        ),
    )


def _of_runs(rows: Sequence[Row]) -> dict[str, str]:
    """Return what replaces the facts of the moment of the report."""
    commits = sorted({row["vcasgd"] for row in rows if "vcasgd" in row})
    loads = [row["load"] for row in rows if "load" in row]
    load = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "unknown"
    return {"load before each run": load, "vcasgd": ", ".join(commits)}


def noise(rows: Sequence[Row]) -> str:
    """Return what is known of other programs that used the processors during the runs."""
    used = [row["others"] for row in rows if row.get("others") is not None]
    if not used:
        return "How much of the processors other programs used was not measured."
    text = (
        f"Other programs used {min(used):.0%} to {max(used):.0%} of the processors in the "
        f"{len(used)} of {len(rows)} runs in which this was measured."
    )
    if median(used) <= MAX_OTHERS:
        return text
    return (
        f"{text} **So all rates are too low, and differences between contenders or faults mean "
        "little.** Run the race again on an idle computer before you rely on them."
    )


def group_of(rows: Iterable[Row], contender: str, column: str) -> list[Row]:
    return [row for row in rows if row["contender"] == contender and row["column"] == column]


def finished(group: Iterable[Row]) -> list[Row]:
    """Return the runs that have figures; one that hangs has them, too."""
    return [row for row in group if row["ended"] in ("ok", "hung")]


def throughput_cell(group: Sequence[Row], runs: int) -> str:
    measured = finished(group)
    if not group:
        return NOT_MEASURED
    if not measured:
        return str(group[-1]["ended"])[:40]
    rate = median(row["samples_per_s"] for row in measured)
    shares = [row["share"] for row in measured if row["share"] is not None]
    share = f" ({median(shares):.2f})" if shares else ""
    failed = len(group) - sum(row["ended"] == "ok" for row in group)
    notes = [f"{failed} of {len(group)} hung or failed"] if failed else []
    notes += [f"{len(group)} run{'s' * (len(group) > 1)}"] if len(group) != runs else []
    return f"{rate:,.0f}{share}" + "".join(f", {note}" for note in notes)


def seconds_to_target(group: Sequence[Row]) -> float | None:
    """Return the median, which is infinite if half of the runs didn't reach the target."""
    measured = finished(group)
    if not measured:
        return None
    return median(
        float("inf") if row["target_s"] is None else float(row["target_s"]) for row in measured
    )


def time_cell(group: Sequence[Row]) -> str:
    seconds = seconds_to_target(group)
    if seconds is None:
        return NOT_MEASURED if not group else "–"
    if seconds != float("inf"):
        return f"{seconds:.1f}"
    best = max((row["accuracy"] or 0.0 for row in finished(group)), default=0.0)
    return f"none ({best:.3f})"


def peers_ahead(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence for each peer that has a better median than vcasgd under a fault."""
    for column in COLUMNS.values():
        ours = group_of(rows, OURS, column.name)
        for name, entrant in ENTRANTS.items():
            theirs = group_of(rows, name, column.name)
            if not entrant.script or not finished(ours) or not finished(theirs):
                continue
            yield from _advantages(entrant, column, ours, theirs)


def _advantages(
    entrant: Entrant, column: Column, ours: Sequence[Row], theirs: Sequence[Row]
) -> Iterator[str]:
    rates = [median(row["samples_per_s"] for row in finished(each)) for each in (ours, theirs)]
    if rates[1] > AHEAD * rates[0]:
        ratio = rates[1] / max(rates[0], 1e-9)
        yield f"{column.title}: {entrant.title} counts {ratio:.2f} × the samples"
    my_time, their_time = seconds_to_target(ours), seconds_to_target(theirs)
    if my_time is not None and their_time is not None and AHEAD * their_time < my_time:
        never = my_time == float("inf")
        needed = "which vcasgd doesn't" if never else f"vcasgd after {my_time:.1f} s"
        reached = f"reaches the target after {their_time:.1f} s"
        yield f"{column.title}: {entrant.title} {reached}, {needed}"


def left_out(rows: Sequence[Row], runs: int) -> Iterator[str]:
    """Yield what the tables lack, with the reason."""
    for column in COLUMNS.values():
        absent: dict[int, list[str]] = {}
        for name, entrant in ENTRANTS.items():
            reason = why_not(entrant, column.action)
            made = len(group_of(rows, name, column.name))
            if reason:
                yield f"{column.title}: {entrant.title} {reason}"
            elif made < runs:
                absent.setdefault(made, []).append(entrant.title)
        if absent:
            groups = (
                f"{made} of {runs} runs of {'; '.join(absent[made])}" for made in sorted(absent)
            )
            yield f"{column.title}: {'. '.join(groups)}"


def _grid(rows: Sequence[Row], columns: Sequence[Column], cell: Callable[[list[Row]], str]) -> str:
    heads = ("", *(column.title for column in columns))
    return table(heads, (_grid_row(rows, one, columns, cell) for one in ENTRANTS.values()))


def _grid_row(
    rows: Sequence[Row],
    entrant: Entrant,
    columns: Sequence[Column],
    cell: Callable[[list[Row]], str],
) -> Iterator[str]:
    yield entrant.title
    for column in columns:
        reason = why_not(entrant, column.action)
        yield "–" if reason else cell(group_of(rows, entrant.name, column.name))


def _details(rows: Sequence[Row]) -> str:
    lines = []
    for column in COLUMNS.values():
        for name, entrant in ENTRANTS.items():
            group = finished(group_of(rows, name, column.name))
            if group:
                lines.append([column.title, entrant.title, *_detail_cells(entrant, group)])
    heads = (
        "fault",
        "contender",
        "samples/s of each run",
        "seconds to the target",
        "MB/s",
        "other programs",
        "longest pause, s",
        "replaced after, s",
    )
    return table((*heads, "faults fired, missed", "repeated samples"), lines)


def _detail_cells(entrant: Entrant, group: Sequence[Row]) -> Iterator[str]:
    yield ", ".join(f"{row['samples_per_s']:,.0f}" for row in group)
    times = [row["target_s"] for row in group if row["accuracy"] is not None]
    yield ", ".join("none" if each is None else f"{each:.1f}" for each in times) or "–"
    carried = [row["bytes_per_s"] for row in group if row["bytes_per_s"] is not None]
    yield f"{median(carried) / 1e6:.2f}" if carried else "–"
    used = [row["others"] for row in group if row.get("others") is not None]
    yield f"{median(used):.0%}" if used else "–"
    yield f"{median(row['longest_pause_s'] for row in group):.1f}"
    # A standby was launched before the loss, so its launch doesn't tell whom it replaces.
    known = entrant.trainers is None
    replaced = [each for row in group for each in row["replaced_s"] if known]
    yield f"{median(replaced):.1f}" if replaced else "–"
    yield f"{sum(row['faults'] for row in group)}, {sum(row['missed'] for row in group)}"
    repeated = [row["repeated"] for row in group if row["repeated"] is not None]
    yield str(sum(repeated)) if repeated else "–"


def _requirements(entrant: Entrant) -> str:
    if entrant.requirements is None:
        return "this repository"
    return ", ".join(entrant.requirements.read_text().split())


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
