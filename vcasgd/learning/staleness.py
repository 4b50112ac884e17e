"""s(τ): the weight of an update with staleness τ (FedAsync, Xie 2019, section 5.2)."""

from __future__ import annotations

import math

from vcasgd.spec.update import Staleness


def weight(spec: Staleness, tau: int) -> float:
    """Return s(τ) in (0, 1], with s(0) = 1.

    ``constant``: 1. ``polynomial``: (1+τ)^−a. ``hinge``: 1 if τ ≤ b, else 1/(a(τ−b)+1).
    A negative τ, which can follow from a restored snapshot, counts as 0.
    """
    late = max(tau, 0)
    match spec.function:
        case "constant":
            return 1.0
        case "polynomial":
            return math.pow(1 + late, -spec.a)
        case "hinge":
            return 1.0 if late <= spec.b else 1 / (spec.a * (late - spec.b) + 1)
