"""Measurements of the product: ``python -m benchmarks.measure NAME``."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vcasgd.cli.output import PlainConsole

if TYPE_CHECKING:
    from benchmarks.measure.figures import Figures, ProcessFigures

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


class CodecName(StrEnum):
    """Value of ``update.codec`` of a job."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Socket(StrEnum):
    """Connection between workers and the tensors server."""

    TCP = "tcp"
    UNIX = "unix"


class KilledPart(StrEnum):
    """Part of a stack that ``python -m benchmarks.measure goodput`` kills."""

    SERVER = "server"
    TENSORS = "tensors"
    LEDGER = "ledger"
    CONTROLLER = "controller"
    HEAD = "head"


@app.callback()
def bench() -> None:
    """Run benchmarks on this machine."""


@app.command("store")
def store_command(
    size_mb: Annotated[int, typer.Option(min=1, help="Model size in MiB, as float32.")] = 64,
    workers: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.5, help="Duration after the warm-up.")] = 6.0,
    codec: Annotated[CodecName, typer.Option(help="Encoding of updates.")] = CodecName.FLOAT32,
    store_nodes: Annotated[
        int, typer.Option(min=1, max=64, help="Number of store nodes to shard the model over.")
    ] = 1,
    worker_socket: Annotated[
        Socket, typer.Option(help="Connection of workers to the tensors server.")
    ] = Socket.TCP,
    memory_mb: Annotated[
        int | None, typer.Option(min=1, help="Memory limit of the tensors server, in MiB.")
    ] = None,
    soak_minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Measure for this long, and report memory growth."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how fast workers and the parameter server exchange updates.

    Starts a ledger, a tensors server, a parameter server, and workers that push without training,
    in a temporary folder. Stop other programs before you run it.
    """
    # Imported here because torch takes seconds to import.
    from benchmarks.measure.store import StoreBenchOptions, measure
    from vcasgd.stack import require_libraries

    require_libraries()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = StoreBenchOptions(
        size_mb=size_mb,
        workers=workers,
        seconds=seconds if soak_minutes is None else soak_minutes * 60,
        codec=codec.value,
        store_nodes=store_nodes,
        worker_socket=worker_socket.value,
        memory_mb=memory_mb,
        soak=soak_minutes is not None,
    )
    figures = measure(options, log=lambda text: typer.echo(text, err=True))
    if as_json:
        typer.echo(json.dumps(figures.to_dict()))
    else:
        _show(figures)


@app.command("control")
def control_command(
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="Simulated workers.")] = 100,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that share the workers.")] = 5,
    subtasks: Annotated[int, typer.Option(min=1, help="Subtasks of each job.")] = 1000,
    seconds: Annotated[float, typer.Option(min=1, help="Duration, once all are admitted.")] = 30.0,
    clients: Annotated[int, typer.Option(min=0, help="Readers of the stream of changes.")] = 10,
    lost: Annotated[
        int | None, typer.Option(min=0, help="Machines lost at the end. [default: half, ≤ 1000]")
    ] = None,
    push_seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds between two updates of a worker.")
    ] = None,
    finished_jobs: Annotated[int, typer.Option(min=0, help="Jobs that ended earlier.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the control plane: ledger, controller, and API, with many simulated workers.

    Starts the servers in a temporary folder, the controller on a simulated cloud, and workers
    that have real connections, leases, heartbeats, and small updates, but don't train.
    """
    from benchmarks.measure.control.measure import ControlBenchOptions, measure
    from vcasgd.stack import require_libraries

    require_libraries()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = ControlBenchOptions(
        workers, jobs, subtasks, seconds, clients, lost, push_seconds, finished_jobs
    )
    figures = measure(options, log=lambda text: typer.echo(text, err=True))
    if as_json:
        typer.echo(json.dumps(figures))
        return
    _show_pairs((name, json.dumps(value)) for name, value in figures.items())


@app.command("goodput")
def goodput_command(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of machines.")] = 4,
    seconds: Annotated[float, typer.Option(min=1, help="Duration with faults.")] = 60.0,
    quiet_seconds: Annotated[
        float,
        typer.Option(min=1, help="Duration before that, for comparison, once progress is even."),
    ] = 30.0,
    evict_every: Annotated[
        float, typer.Option(min=0, help="Seconds between two losses; 0 for none.")
    ] = 15.0,
    at_once: Annotated[int, typer.Option(min=1, help="Machines that are lost at a time.")] = 1,
    notice: Annotated[
        float | None, typer.Option(min=0, help="Seconds of notice. [default: kill machines]")
    ] = None,
    kill_part: Annotated[
        KilledPart | None, typer.Option(help="Kill a part of the stack instead of machines.")
    ] = None,
    pace_ms: Annotated[
        float, typer.Option(min=1, help="Milliseconds in which a machine trains 64 samples.")
    ] = 80.0,
    epoch_samples: Annotated[
        int, typer.Option(min=1024, help="Samples in an epoch. Waits show at its end.")
    ] = 16_384,
    slow: Annotated[float, typer.Option(min=1, help="How much slower one machine is.")] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="JSON file with the number of machines over time.")
    ] = None,
    faster: Annotated[float, typer.Option(min=1e-6, help="Speed-up factor for the trace.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed for the machines that are lost.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what losses of machines cost, with local machines and steps that only take time.

    Goodput is the samples that were applied over what the same machines do in as many
    machine-seconds without faults. Starts a stack in a temporary folder.
    """
    from benchmarks.measure.goodput_run import GoodputOptions, measure_goodput
    from vcasgd.settings import load_settings

    options = GoodputOptions(
        workers, seconds, quiet_seconds, evict_every, at_once, notice,
        kill_part.value if kill_part else None, pace_ms, epoch_samples, slow, trace, faster, seed,
    )  # fmt: skip
    figures = measure_goodput(options, load_settings(), lambda text: typer.echo(text, err=True))
    if as_json:
        typer.echo(json.dumps(figures.to_dict()))
        return
    _show_pairs((name, json.dumps(value)) for name, value in figures.to_dict().items())


@app.command("codecs")
def codecs_command(
    size_mb: Annotated[int, typer.Option(min=1, help="Update size in MiB, as float32.")] = 64,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Processor seconds for each measurement.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure size, speed and error of the encodings of updates, in this process."""
    from benchmarks.measure.codecs import measure_codecs

    figures = measure_codecs(size_mb, seconds)
    if as_json:
        typer.echo(json.dumps({"size_mb": size_mb, "codecs": [each.to_dict() for each in figures]}))
        return
    heads = ("codec", "MB", "of float32", "encode GB/s", "decode GB/s", "relative error")
    rows = [
        [each.codec, f"{each.bytes_per_update / 1e6:.1f}", f"{each.share_of_float32:.1%}",
         f"{each.encode_gb_s:.2f}", f"{each.decode_gb_s:.2f}", f"{each.relative_error:.2g}"]
        for each in figures
    ]  # fmt: skip
    _show_table(heads, rows)


@app.command("data")
def data_command(
    location: Annotated[
        str, typer.Argument(metavar="LOCATION", help="Sharded data set with an index.")
    ],
    workers: Annotated[int, typer.Option(min=1, help="Simulated workers; one is measured.")] = 4,
    subtasks: Annotated[int, typer.Option(min=1, help="Subtasks per epoch.")] = 50,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per local step.")] = 64,
    step_seconds: Annotated[float, typer.Option(min=0, help="Training time per step.")] = 0.01,
    memory_mb: Annotated[
        int, typer.Option(min=1, help="Memory for decoded shards, in MiB.")
    ] = 1024,
    disk_mb: Annotated[
        int, typer.Option(min=1, help="Disk space for shard files, in MiB.")
    ] = 10240,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how long one of several workers waits for its data in an epoch.

    Compares three ways to read: in any order, in shard order, and with prefetching.
    """
    from benchmarks.measure.data import Reading, measure_reading

    reading = Reading(workers, subtasks, batch_size, step_seconds, memory_mb << 20, disk_mb << 20)
    rows = measure_reading(location, reading)
    if as_json:
        typer.echo(json.dumps({"location": location, **asdict(reading), "rows": rows}))
        return
    heads = ("reading", "seconds", "waited s", "hits", "downloads", "MB")
    cells = [
        [str(row["reading"]), f"{row['seconds']:.2f}", f"{row['stall_seconds']:.2f}",
         f"{row['hit_rate']:.1%}", f"{row['downloads']}", f"{row['downloaded_bytes'] / 1e6:.1f}"]
        for row in rows
    ]  # fmt: skip
    _show_table(heads, cells)


def _show(figures: Figures) -> None:
    _show_pairs(figures.lines())
    processes = figures.processes
    soak = any(each.slope_mb_per_minute is not None for each in processes.values())
    heads = ["process", "before", "least", "most", "models", "CPU s"]
    rows = [[name, *_cells(each)] for name, each in processes.items()]
    _show_table(heads + (["first", "last", "MB/min"] if soak else []), rows)


def _cells(each: ProcessFigures) -> list[str]:
    cells = [f"{each.baseline_mb:.0f} MB", f"{each.resident_min_mb:.0f} MB",
             f"{each.resident_max_mb:.0f} MB", f"{each.resident_max_models:.2f}",
             f"{each.cpu_seconds:.2f}"]  # fmt: skip
    if each.slope_mb_per_minute is not None:
        cells += [f"{each.first_mb:.1f} MB", f"{each.last_mb:.1f} MB",
                  f"{each.slope_mb_per_minute:+.3f}"]  # fmt: skip
    return cells


def _show_pairs(rows: Iterable[tuple[str, str]]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    PlainConsole().print(table)


def _show_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column is text, and all others numbers."""
    table = Table(box=None, pad_edge=False)
    for nth, head in enumerate(heads):
        table.add_column(head, justify="right" if nth else "left")
    for row in rows:
        table.add_row(*row)
    PlainConsole().print(table)


if __name__ == "__main__":
    app()
