"""Measure what each kind of loss costs, on local machines whose steps take 80 ms.

    python benchmarks/goodput.py [--repetitions 1] [--only kill notice]

Runs ``python -m benchmarks.measure goodput`` under each fault in turn, as often as asked for, and
writes ``benchmarks/results/goodput.md`` with the rows of all runs. Each run takes about 100
seconds. Stop other programs before you run it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from markdown import table

RESULTS = Path(__file__).resolve().parent / "results"
TRACE = Path(__file__).resolve().parent / "cifar10/traces/aws-v100-4node-us-east-2a-2023-08-03.json"
#: Options of ``python -m benchmarks.measure goodput``, by the name of the fault.
FAULTS = {
    "none": "--evict-every 0",
    "kill": "",
    "notice of 5 s": "--notice 5",
    "3 of 4 at once": "--at-once 3 --evict-every 30",
    "one machine 4 times slower": "--evict-every 0 --slow 4",
    "recorded spot history": f"--trace {TRACE} --faster 2000",
    "kill the parameter server": "--kill-part server --evict-every 30",
    "kill the tensors server": "--kill-part tensors --evict-every 30",
    "kill the ledger": "--kill-part ledger --evict-every 30",
    "kill the controller": "--kill-part controller --evict-every 30",
    "kill Ray's head": "--kill-part head --evict-every 30",
}
MAX_SECONDS = 900

PAGE = """\
# Goodput under faults

    {command}

Each row is one run of `python -m benchmarks.measure goodput` with the shown options: 4 local
machines; each trains 64 samples in 80 ms and pushes them. Once their progress is even, 30 s
without faults are measured. Then faults happen for 60 s, every 15 s if the options don't say
otherwise. *Goodput* is the samples that were applied over what the same machines did without
faults in as many machine-seconds that existed. *With boot* also counts the machine-seconds in
which a replacement boots. *Of the pace* compares with machines that do nothing but steps, and
exchange nothing.

{machine}

{table}

A goodput above 1 means that the time without faults was slower. So compare *of the pace*, and the
samples per second with faults, with those of *none*. One machine that is 4 times slower leaves 3.25
of 4 machines, which is 0.81.
"""


def measured(options: str) -> dict[str, Any]:
    """Return what one run printed."""
    argv = [sys.executable, "-m", "benchmarks.measure", "goodput", "--json", *shlex.split(options)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=MAX_SECONDS)
    if done.returncode:
        raise SystemExit(f"{shlex.join(argv)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(fault: str, options: str, figures: dict[str, Any]) -> list[str]:
    replaced = figures["replaced_s"]
    return [
        fault,
        f"`{options.replace(str(TRACE), TRACE.name)}`" if options else "",
        f"{figures['quiet_samples_per_s']:,.0f}",
        f"{figures['faulty_samples_per_s']:,.0f}",
        f"**{figures['goodput']:.2f}**",
        f"{figures['goodput_with_boot']:.2f}",
        f"{figures['share_of_pace']:.2f}",
        str(figures["losses"]),
        ", ".join(f"{each:.1f}" for each in replaced) or "–",
        f"{figures['longest_pause_s']:.1f}",
        f"{figures['samples_lost']}, {figures['samples_repeated']}",
    ]


def report(rows: Sequence[Sequence[str]], conditions: dict[str, str], command: str) -> str:
    heads = ("fault", "options", "quiet, samples/s", "with faults, samples/s", "goodput")
    heads += (
        "with boot",
        "of the pace",
        "machines lost",
        "replaced after, s",
        "longest pause, s",
        "lost, repeated",
    )
    shown = table(("", ""), conditions.items())
    return PAGE.format(command=command, machine=shown, table=table(heads, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--out", type=Path, default=RESULTS / "goodput.md")
    given = parser.parse_args()
    conditions = machine.describe()
    command = f"python benchmarks/goodput.py {shlex.join(sys.argv[1:])}".strip()
    rows: list[tuple[str, list[str]]] = []
    for number in range(given.repetitions):
        for fault in given.only:
            figures = measured(FAULTS[fault])
            print(f"{number + 1} of {given.repetitions}: {fault}: {figures}", flush=True)
            rows.append((fault, row(fault, FAULTS[fault], figures)))
            # Together, because repetitions are in turns; and after each run, to be interrupted.
            ordered = [each for _, each in sorted(rows, key=lambda one: given.only.index(one[0]))]
            given.out.write_text(report(ordered, conditions, command))


if __name__ == "__main__":
    main()
