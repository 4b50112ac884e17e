"""Virtual environments of the peers, below ``.venvs``."""

from __future__ import annotations

import subprocess
import tempfile
import venv
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parent / ".venvs"
#: Pins torch, because newer versions bring large GPU libraries.
CONSTRAINTS = "torch==2.13.0\n"


def python_of(environment: str) -> Path:
    """Return the interpreter of an environment."""
    return ENVIRONMENTS / environment / "bin" / "python"


def prepare_environment(environment: str, requirements: Path) -> str:
    """Create an environment unless it exists, and return pip's error, or an empty string."""
    stamp = ENVIRONMENTS / environment / ".installed"
    wanted = requirements.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    print(f"installing {environment}", flush=True)
    venv.create(ENVIRONMENTS / environment, with_pip=True, clear=True)
    problem = _install(environment, requirements)
    if not problem:
        stamp.write_text(wanted)
    return problem


def _install(environment: str, requirements: Path) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(CONSTRAINTS)
        constraints.flush()
        done = subprocess.run(
            [str(python_of(environment)), "-m", "pip", "install", "--quiet", "--requirement",
             str(requirements), "--constraint", constraints.name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    lines = done.stderr.strip().splitlines() or ["pip failed"]
    return lines[-1] if done.returncode else ""
