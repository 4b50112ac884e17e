"""Versions of the packages that the platform itself needs."""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: The distribution of this package.
PLATFORM = "vcasgd"


def platform_versions() -> dict[str, str]:
    """Return the versions of this package's dependencies, and of theirs, by sorted names.

    A job can't replace them. All installed packages count if this package is not installed itself.
    """
    try:
        found = _needed_by(distribution(PLATFORM))
    except PackageNotFoundError:
        found = {canonicalize_name(each.name): each.version for each in distributions()}
    return dict(sorted(found.items()))


def _needed_by(root: Distribution) -> dict[str, str]:
    found: dict[str, str] = {}
    left = [root]
    while left:
        for line in left.pop().requires or ():
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            if name in found or not (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ):
                continue
            try:
                needed = distribution(name)
            except PackageNotFoundError:
                continue
            found[name] = needed.version
            left.append(needed)
    return found
