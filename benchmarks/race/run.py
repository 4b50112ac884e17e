"""``make race``: train with every contender under every fault, in turns, and write a report.

    python benchmarks/race/run.py [--models NAME …] [--contenders NAME …] [--faults NAME …]
        [--runs 3] [--seconds 60]

Runs what has no row yet in ``results/race.jsonl``, and writes ``results/race.md``. It can be
interrupted at any time. Stop other programs before you run it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Before installed packages, of which one is named as a module here.
sys.path.insert(1, str(HERE.parent))

import machine  # noqa: E402
from entrants import ENTRANTS, Entrant, why_not  # noqa: E402
from environments import prepare_environment  # noqa: E402
from faults import COLUMNS  # noqa: E402
from outcomes import (  # noqa: E402
    RESULTS,
    WORKLOADS,
    Heat,
    Row,
    Workload,
    append_row,
    make_row,
    missing,
    read_rows,
)
from race_report import write_report  # noqa: E402
from switch import DEVICE  # noqa: E402

DATA = HERE.parents[1] / "examples" / "mnist" / "data" / "mnist.npz"
#: Seconds that a run may take besides the measured ones: start, end, and judgment.
MORE_SECONDS = 480.0
#: Seconds for an interrupted run to kill its machines.
STOP_SECONDS = 30.0
ISOLATION = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contenders", nargs="+", choices=ENTRANTS, default=list(ENTRANTS),
                        metavar="NAME", help=", ".join(ENTRANTS))  # fmt: skip
    parser.add_argument("--faults", nargs="+", choices=COLUMNS, default=list(COLUMNS),
                        metavar="NAME", help=", ".join(COLUMNS))  # fmt: skip
    parser.add_argument("--runs", type=int, default=3, help="of each contender and fault")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS),
                        metavar="NAME", help=", ".join(WORKLOADS))  # fmt: skip
    parser.add_argument("--seconds", type=float, help="measured in each run; default: the model's")
    parser.add_argument("--data", type=Path, default=DATA, help="mnist.npz")
    parser.add_argument("--results", type=Path, default=RESULTS, help="rows; the report is beside")
    parser.add_argument("--list", action="store_true", help="list what is missing, run nothing")
    return parser.parse_args()


def main() -> int:
    given = options()
    # Exit normally, so that the current run is killed too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    workloads = {
        name: replace(each, seconds=given.seconds or each.seconds)
        for name, each in WORKLOADS.items()
    }
    chosen = [workloads[name] for name in given.models]
    left = [(heat, workload) for workload in chosen for heat in _left(given, workload)]
    if given.list:
        print("\n".join(f"{workload.model}: {heat}" for heat, workload in left))
        return 0
    if left and not given.data.exists():
        raise SystemExit(f"{given.data} is missing: see examples/mnist/README.md")
    isolated = may_isolate()
    problems = prepare({ENTRANTS[heat.contender] for heat, _ in left})
    for nth, (heat, workload) in enumerate(left):
        entrant = ENTRANTS[heat.contender]
        if entrant.environment in problems:
            print(f"{heat}: {problems[entrant.environment]}", flush=True)
            continue
        print(f"{nth + 1} of {len(left)}: {workload.model}, {heat}", flush=True)
        conditions = {
            "at": round(time.time()),
            "load": round(os.getloadavg()[0], 2),
            "vcasgd": machine.describe()["vcasgd"],
        }
        row = {**run_apart(heat, workload, given.data, isolated), **conditions}
        append_row(row, given.results)
        shown = {name: value for name, value in row.items() if name not in ("curve", "workload")}
        print(f"    {shown}", flush=True)
        _report(given, workloads)
    _report(given, workloads)
    return 0


def _report(given: argparse.Namespace, workloads: Mapping[str, Workload]) -> None:
    path = given.results.with_suffix(".md")
    write_report(read_rows(given.results), workloads, path, given.runs)


def _left(given: argparse.Namespace, workload: Workload) -> list[Heat]:
    problem = links_problem()
    measurable = [name for name in given.faults if not (COLUMNS[name].link and problem)]
    for name in set(given.faults).difference(measurable):
        print(f"{name}: not measured, because {problem}", flush=True)
    heats = missing(given.contenders, measurable, given.runs, workload, read_rows(given.results))
    return [
        heat for heat in heats if not why_not(ENTRANTS[heat.contender], COLUMNS[heat.column].action)
    ]


def prepare(entrants: set[Entrant]) -> dict[str, str]:
    """Create missing virtual environments, and return the errors by environment."""
    wanted = {one.environment: one.requirements for one in entrants if one.requirements}
    problems = {name: prepare_environment(name, path) for name, path in sorted(wanted.items())}
    return {name: problem for name, problem in problems.items() if problem}


def links_problem() -> str:
    """Return why slow links can't be made here, or an empty string."""
    if not may_isolate():
        return "this user may not create networks"
    return "" if DEVICE.exists() else f"there is no {DEVICE}"


def may_isolate() -> bool:
    """Return True if this user may create namespaces of networks and processes."""
    tools = shutil.which("unshare") and shutil.which("ip")
    return bool(tools) and subprocess.run([*ISOLATION, "true"], capture_output=True).returncode == 0


def run_apart(heat: Heat, workload: Workload, data: Path, isolated: bool) -> Row:
    """Run a heat in a process of its own, and return its row."""
    argv = [sys.executable, str(HERE / "heat.py"), json.dumps(asdict(heat)),
            json.dumps(asdict(workload)), str(data.resolve())]  # fmt: skip
    if isolated:
        # The shell stays, to adopt processes that have lost their parent.
        script = f"ip link set lo up; {shlex.join([*argv, '--isolated'])}; exit $?"
        argv = [*ISOLATION, "sh", "-c", script]
    search = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE / "workers")))
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": search},
    )
    try:
        output, _ = process.communicate(timeout=workload.seconds + MORE_SECONDS)
    except subprocess.TimeoutExpired:
        return make_row(heat, workload, {"ended": "hung: its processes did not end"})
    finally:
        _stop(process)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return make_row(heat, workload, {"ended": "error: see above"})
    row: Row = json.loads(lines[-1])
    return row


def _stop(process: subprocess.Popen[str]) -> None:
    """End a heat, which ends its machines; in a namespace, the kernel kills everything."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
