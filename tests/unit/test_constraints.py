"""``constraints-runtime.txt``: the part of ``constraints.txt`` that machines of clouds install."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_runtime_constraints_are_those_of_the_package_and_its_clouds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    clouds = [*extras["stack"], *extras["aws"], *extras["gcp"]]
    needed = _closure([*project["dependencies"], *clouds])
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    wanted = [line for line in lines if canonicalize_name(line.partition("==")[0]) in needed]

    _, *found = (ROOT / "constraints-runtime.txt").read_text().splitlines()

    assert len(wanted) > 30
    # Regenerate the file with these lines if this fails.
    assert found == wanted


def _closure(requirements: Iterable[str]) -> set[str]:
    """Return the names of all installed packages that the requirements need, with their extras."""
    waiting = [Requirement(each) for each in requirements]
    known: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in known:
                continue
            known.add((name, extra))
            try:
                requires = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # only on another system
            parsed = [Requirement(each) for each in requires]
            waiting += [
                each
                for each in parsed
                if each.marker is None or each.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in known}
