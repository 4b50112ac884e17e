"""Programs on a computer with the GPUs of a fake management library, in a process of their own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.processes import run_program

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/support/nvml"


def environment(cards: Sequence[dict[str, Any]] | None, **variables: str) -> dict[str, str]:
    """Return variables for a process that sees these GPUs; None: there is no driver."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("VCASGD_")}
    own.pop("CUDA_VISIBLE_DEVICES", None)
    if cards is not None:
        own["FAKE_GPUS"] = json.dumps(cards)
    return {**own, "PYTHONPATH": os.pathsep.join([str(FAKE), str(ROOT)]), **variables}


def on_gpus(
    home: Path, program: str, cards: Sequence[dict[str, Any]] | None, **variables: str
) -> Any:
    """Return the JSON that a program prints."""
    done = run_program(
        [sys.executable, "-c", program],
        env=environment(cards, VCASGD_HOME=str(home), **variables),
        check=True,
    )
    return json.loads(done.stdout)
