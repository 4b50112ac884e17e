"""Inject the faults of a scenario during a job, and compare their cost with the expected one.

    python -m scenarios FILE.yaml [--json]

Starts a stack in a temporary folder. Exits with status 0 only if every fault fired and cost no more
than the scenario expects.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from scenarios.run import describe_scenario, run_scenario
from scenarios.scenario import Scenario
from vcasgd.errors import VcasgdError


def main() -> int:
    """Run the scenario that the arguments name. Return the exit status."""
    parser = argparse.ArgumentParser(prog="scenarios", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", metavar="FILE.yaml", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    progress = sys.stderr if options.json else sys.stdout
    report = run_scenario(
        Scenario.load(options.file), log=lambda text: print(text, file=progress, flush=True)
    )
    for line in [json.dumps(report.as_json())] if options.json else describe_scenario(report):
        print(line)
    return 0 if report.passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VcasgdError as error:
        sys.exit(f"error: {error}")
