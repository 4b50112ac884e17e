"""``make bench``: measure the store and its peers in turns, and write a report.

    python benchmarks/run.py [--sizes 16 64] [--repetitions 3] [--seconds 6] [--only NAME …]

Stop other programs before you run it. Writes ``benchmarks/results/store.md`` and ``store.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import report
from contenders import CONTENDERS, Contender
from environments import prepare_environment
from vcasgd.fleet.providers.local.processes import MARKER, kill_all

HERE = Path(__file__).resolve().parent
#: Seconds for one run, from the start of its processes to their end.
RUN_SECONDS = 180.0
#: Seconds between two runs, to release sockets and memory.
PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class Options:
    sizes: list[int]
    repetitions: int
    seconds: float
    only: list[str]
    out: Path


def options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64], help="MiB")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured in each run")
    parser.add_argument("--only", nargs="*", default=[], choices=[one.name for one in CONTENDERS])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "store")
    return Options(**vars(parser.parse_args()))


def prepare(contenders: list[Contender]) -> dict[str, str]:
    """Create missing virtual environments, and return the errors by environment."""
    requirements = {one.environment: one.requirements for one in contenders if one.environment}
    problems = {name: prepare_environment(name, path) for name, path in requirements.items()}
    return {name: problem for name, problem in problems.items() if problem}


def run_once(contender: Contender, size_mb: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one run, or ``{"error": …}``, and clean up."""
    mark = f"benchmark:{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="vcb-", dir="/tmp") as folder:
        errors = Path(folder) / "stderr"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                contender.argv(size_mb, seconds),
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, MARKER: mark, "TMPDIR": folder},
            )
        try:
            output, _ = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return {"error": f"did not end within {RUN_SECONDS:.0f} s"}
        finally:
            process.kill()
            process.wait()
            kill_all(mark, None)
        return figures_in(output) or {"error": last_line(errors)}


def figures_in(output: bytes) -> dict[str, Any] | None:
    """Return the last line that is a JSON object; libraries print other lines."""
    for line in reversed(output.decode(errors="replace").splitlines()):
        if line.startswith("{"):
            figures: dict[str, Any] = json.loads(line)
            return figures
    return None


def last_line(errors: Path) -> str:
    lines = errors.read_text(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it printed nothing"


def main() -> int:
    opts = options()
    # Exit normally, so that the current run is killed too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    contenders = [one for one in CONTENDERS if not opts.only or one.name in opts.only]
    problems = prepare(contenders)
    facts, started_at = machine.describe(), time.time()
    results: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for repetition in range(opts.repetitions):
        for size in opts.sizes:
            for one in contenders:
                if one.environment in problems:
                    results[one.name][size] = [{"error": problems[one.environment]}]
                    continue
                if one.information and repetition:
                    continue
                figures = run_once(one, size, opts.seconds)
                results[one.name][size].append(figures)
                shown = figures.get("error") or f"{figures['updates_per_s']:.2f} updates/s"
                print(f"{repetition + 1}/{opts.repetitions} {size} MiB {one.title}: {shown}",
                      flush=True)  # fmt: skip
                time.sleep(PAUSE_SECONDS)
    report.write(opts.out, report.Report(
        facts=facts,
        started_at=started_at,
        minutes=(time.time() - started_at) / 60,
        command=f"python benchmarks/run.py {' '.join(sys.argv[1:])}".strip(),
        contenders=contenders,
        results={name: dict(sizes) for name, sizes in results.items()},
    ))  # fmt: skip
    print(f"wrote {opts.out}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
