#!/usr/bin/env python3
"""Check protocol.pml with spin: the protocol holds, and each check in it is needed.

    docs/protocol/check.py [--quick | --deep]

The exit status is 0 if the full model has no error, if a state with all faults and all work
applied is reachable, and if each weakened model has an error. It is 1 otherwise, and 2 if spin or a
C compiler is missing. ``--deep`` adds larger constants (minutes, and 2 GB of memory). ``--quick``
explores one full model and one without a check.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).with_name("protocol.pml")
MEMORY_MIB = 2000
#: Limit for one model; the longest takes about 20 s on an idle machine.
MAX_SECONDS = 600


@dataclass(frozen=True)
class Case:
    """A set of constants and switches, and whether an assertion must fail."""

    title: str
    defines: str
    fails: bool = False


ONE = "SUBTASKS=1 SIZE=2"  # partial pushes
TWO = "SUBTASKS=2 SIZE=1"  # a publication that touches only some subtasks

CASES = (
    Case("lost answers", f"{ONE} INTERVALS=2 LOSSES=0 CUTS=1"),
    Case("an empty tensors server", f"{ONE} INTERVALS=1 LOSSES=1 CUTS=0"),
    Case("all work is applied after all faults",
         f"{ONE} INTERVALS=1 LOSSES=1 CUTS=1 GOAL", fails=True),
    Case("the same with two subtasks",
         f"{TWO} INTERVALS=1 LOSSES=1 CUTS=1 GOAL", fails=True),
    Case("without the server's fence, invariant 3",
         f"{ONE} INTERVALS=2 LOSSES=0 CUTS=0 NO_SERVER_FENCE", fails=True),
    Case("without the server's fence and the base version, invariant 1",
         f"{TWO} INTERVALS=2 LOSSES=0 CUTS=0 NO_SERVER_FENCE NO_BASE_CHECK ONLY_EXACT", fails=True),
    Case("without the writer of a version, invariant 1",
         f"{TWO} INTERVALS=1 LOSSES=1 CUTS=0 NO_WRITER_CHECK ONLY_EXACT", fails=True),
    Case("without the lease's token, invariant 3",
         f"{ONE} INTERVALS=2 LOSSES=0 CUTS=0 NO_LEASE_TOKEN", fails=True),
    Case("without the position in push.lua",
         f"{ONE} INTERVALS=1 LOSSES=1 CUTS=0 NO_POSITION_CHECK", fails=True),
    Case("without the position in the parameter server, invariant 1",
         f"{ONE} INTERVALS=2 LOSSES=0 CUTS=1 NO_RECORD_CHECK ONLY_EXACT", fails=True),
    Case("invariant 1 does not need the lease's token",
         f"{ONE} INTERVALS=2 LOSSES=0 CUTS=0 NO_LEASE_TOKEN ONLY_EXACT"),
)  # fmt: skip

QUICK = (
    Case("two intervals of each worker", f"{ONE} INTERVALS=2 LOSSES=0 CUTS=0"),
    Case("without the lease's token, invariant 3",
         f"{ONE} INTERVALS=2 LOSSES=0 CUTS=0 NO_LEASE_TOKEN", fails=True),
)  # fmt: skip

DEEP = (
    Case("two subtasks, an empty tensors server", f"{TWO} INTERVALS=1 LOSSES=1 CUTS=0"),
    Case("an empty tensors server and lost answers", f"{ONE} INTERVALS=1 LOSSES=1 CUTS=1"),
    Case("two losses", f"{ONE} INTERVALS=1 LOSSES=2 CUTS=0"),
    Case("two intervals of each worker and a loss", f"{ONE} INTERVALS=2 LOSSES=1 CUTS=0"),
    Case("a third lease", f"{ONE} INTERVALS=2 LEASES=3 LOSSES=0 CUTS=0"),
    Case("two subtasks, a loss, lost answers", f"{TWO} INTERVALS=1 LOSSES=1 CUTS=1"),
)


def run(command: Sequence[str], where: Path) -> str:
    """Return a command's output. Raises :class:`subprocess.SubprocessError`."""
    done = subprocess.run(
        command,
        cwd=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MAX_SECONDS,
        check=True,
    )
    return done.stdout


def explore(case: Case) -> str:
    """Return the verifier's report on one case."""
    switches = [f"-D{each}" for each in case.defines.split()]
    options = ["-O2", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}"]
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        run(["spin", "-a", *switches, str(MODEL)], where)
        run(["cc", *options, "-o", "pan", "pan.c"], where)
        return run(["./pan", "-E", "-m100000"], where)


def verdict(case: Case, report: str) -> tuple[bool, str]:
    """Return True if the report is as expected, and a description."""
    violated = re.search(r"assertion violated (.*) \(at depth (\d+)\)", report)
    errors = re.search(r"errors: (\d+)", report)
    states = re.search(r"(\d+) states, stored", report)
    if errors is None or states is None:
        return False, f"spin did not finish:\n{report}"
    if violated:
        return case.fails, f"violated after {violated[2]} steps: {violated[1]}"
    if errors[1] != "0" or re.search(r"Search not completed|search depth too small", report):
        return False, f"the search was not complete:\n{report}"
    return not case.fails, f"no error in {int(states[1]):,} states"


def main(arguments: Sequence[str]) -> int:
    for program in ("spin", "cc"):
        if shutil.which(program) is None:
            print(f"{program} is not installed (Debian: apt install spin gcc libc6-dev)")
            return 2
    wrong = 0
    cases = QUICK if "--quick" in arguments else CASES + (DEEP if "--deep" in arguments else ())
    for case in cases:
        began = time.monotonic()
        expected, words = verdict(case, explore(case))
        wrong += not expected
        took = time.monotonic() - began
        print(
            f"{'ok   ' if expected else 'WRONG'} {took:5.1f} s  {case.title}: {words}", flush=True
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
