"""``vcasgd simulate``: a job in this process, on machines and a clock that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vcasgd.cli.jobfile import load_job
from vcasgd.cli.money import Changes
from vcasgd.cli.output import Json, duration, err, out, show_json
from vcasgd.errors import SpecError

if TYPE_CHECKING:
    from vcasgd.bench.simulation import Outcome, Point


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Jobs")(simulate)


def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The job file.")],
    workers: Annotated[int, typer.Option(min=1, help="Machines, at most, with a trace.")] = 4,
    trace: Annotated[
        Path | None, typer.Option(help="JSON file that says how many machines there are when.")
    ] = None,
    faster: Annotated[
        float, typer.Option(min=1e-6, help="How many times faster the trace goes by.")
    ] = 1.0,
    seconds_per_sample: Annotated[
        float, typer.Option(min=1e-9, help="Of an average machine, modelled.")
    ] = 0.001,
    spread: Annotated[
        float, typer.Option(min=0, help="Of the machines' times: σ of a log-normal factor.")
    ] = 0.2,
    latency: Annotated[
        float, typer.Option(min=0, help="Seconds from a push until it is blended.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the machines' times.")] = 0,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Train a job in this process, as many asynchronous machines would.

    Everything that decides about accuracy is real: the rule, the encoding, staleness, evictions.
    Machines, time and money are not needed. The same seed gives the same result.
    """
    # torch takes seconds to import, and few commands need it
    from vcasgd.bench.presence import machines
    from vcasgd.bench.simulation import Conditions, Simulation
    from vcasgd.task.task import load_task

    spec = load_job(file, changes or ())
    if ":" not in spec.task:
        raise SpecError(
            f"task: {spec.task} is a script, which has one model for one worker",
            remedy="simulate the same training as a vcasgd.Task, module:Class",
            field="task",
        )
    if trace is None and faster != 1:
        raise SpecError("--faster: there is no --trace that could go by faster", field="faster")
    lives = machines(workers, trace, faster, seed)
    outcome = Simulation(
        spec,
        lambda: load_task(spec.task, spec.args, Path(spec.working_dir)),
        Conditions(lives, seconds_per_sample, spread, latency, seed),
        say=lambda point: err.print(_line(point), markup=False),
    ).run()
    if as_json:
        show_json(outcome.to_dict())
    else:
        _show(outcome)


def _line(point: Point) -> str:
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in point.metrics.items())
    return f"epoch {point.epoch}  {duration(point.seconds)}  {point.samples} samples  {metrics}"


def _show(outcome: Outcome) -> None:
    facts = {
        "updates": f"{outcome.updates}, {outcome.bytes_pushed / 1e6:.1f} MB",
        "staleness": f"{outcome.staleness_mean:.2f} on average",
        "time": f"{duration(outcome.seconds)}, modelled",
        "machines lost": f"{outcome.machines_lost}",
        "trained again": f"{outcome.samples_lost} samples",
    }
    for name, value in facts.items():
        out.print(f"{name:<15}{value}", markup=False)
