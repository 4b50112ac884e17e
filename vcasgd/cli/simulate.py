"""``vcasgd simulate``: a job in this process, on simulated machines and a simulated clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vcasgd.cli.jobfile import load_job
from vcasgd.cli.jobs import metrics_text
from vcasgd.cli.money import Changes
from vcasgd.cli.output import Json, duration, err, show_facts, show_json
from vcasgd.errors import SpecError
from vcasgd.settings import load_settings

if TYPE_CHECKING:
    from vcasgd.simulation.job import Outcome, Point


Workers = Annotated[int, typer.Option(min=1, help="Number of machines; with --trace, the maximum.")]
Trace = Annotated[
    Path | None, typer.Option(help="JSON file with the number of machines over time.")
]
Faster = Annotated[float, typer.Option(min=1e-6, help="Speed-up factor for the trace.")]
SecondsPerSample = Annotated[
    float, typer.Option(min=1e-9, help="Simulated training time of an average machine.")
]
SpeedRange = Annotated[
    float, typer.Option(min=1, help="Speed of the fastest machines relative to the slowest.")
]
Spread = Annotated[
    float, typer.Option(min=0, help="Variation of training times: σ of a log-normal factor.")
]
Latency = Annotated[
    float, typer.Option(min=0, help="Seconds from a push until its update is applied.")
]
Boot = Annotated[
    float, typer.Option("--boot-seconds", min=0, help="Seconds from a purchase until it trains.")
]
Price = Annotated[
    float | None, typer.Option("--price-per-hour", min=0, help="USD of a machine, for the cost.")
]
Seed = Annotated[int, typer.Option(help="Random seed for the machines and their times.")]


def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Job file, or its folder.")],
    workers: Workers = 4,
    trace: Trace = None,
    faster: Faster = 1.0,
    seconds_per_sample: SecondsPerSample = 0.001,
    speed_range: SpeedRange = 1.0,
    spread: Spread = 0.2,
    latency: Latency = 0.0,
    boot: Boot = 0.0,
    price: Price = None,
    seed: Seed = 0,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Simulate asynchronous training of a job on many machines, in this process.

    Update rules, encodings, and staleness work as in a real job. Machines, network, and time are
    simulated. The same seed gives the same result.
    """
    # Imported here because torch takes seconds to import.
    from vcasgd.fleet.histories import RETRY_SECONDS, machines
    from vcasgd.session.script import load
    from vcasgd.simulation.job import Conditions, Simulation
    from vcasgd.storage.base_files import prepare_base

    spec = load_job(file, changes or ())
    if trace is None and faster != 1:
        raise SpecError("--faster: has no effect without --trace", field="faster")
    prepare_base(spec.base, load_settings())
    lives = machines(workers, trace, faster, seed, RETRY_SECONDS)
    outcome = Simulation(
        spec,
        lambda: load(spec.task, spec.args, Path(spec.working_dir)),
        Conditions(
            lives, seconds_per_sample, spread, latency, seed, speed_range, boot_seconds=boot
        ),
        on_point=lambda point: err.print(_line(point)),
    ).run()
    if as_json:
        usd = None if price is None else outcome.machine_seconds / 3600 * price
        show_json({**outcome.to_dict(), "usd": usd})
    else:
        _show(outcome, price)


def _line(point: Point) -> str:
    text = f"epoch {point.epoch}  {duration(point.seconds)}  {point.samples} samples"
    return f"{text}  {metrics_text(point.metrics)}"


def _show(outcome: Outcome, price: float | None) -> None:
    facts = {
        "updates": f"{outcome.updates}, {outcome.bytes_pushed / 1e6:.1f} MB",
        "fetched": f"{outcome.bytes_fetched / 1e6:.1f} MB",
        "staleness": f"mean {outcome.staleness_mean:.2f}",
        "time": f"{duration(outcome.seconds)}, simulated",
        "machine time": f"{duration(outcome.machine_seconds)} of all machines",
        "machines lost": f"{outcome.machines_lost}",
        "trained again": f"{outcome.samples_lost} samples",
    }
    if price is not None:
        facts["cost"] = f"{outcome.machine_seconds / 3600 * price:.2f} USD"
    if outcome.divergence is not None:
        facts["diverged"] = outcome.divergence
    if outcome.ended is not None:
        facts["ended early"] = outcome.ended
    show_facts(facts.items(), width=15)
