"""Exponential moving average of a model over the steps of its job: ``ema`` in the job file.

A plain loop averages after each step, ``e ← d·e + (1 − d)·w``. A parameter server sees a version
``w'`` only after k steps from ``w``. On a straight line between both, step i ends at
``w + (i/k)·Δ`` with ``Δ = w' − w``, and the k steps of the plain loop add up to
``e ← dᵏ·e + (1 − dᵏ)·w + c·Δ`` with ``c = 1 − d·(1 − dᵏ) / (k·(1 − d))``.
"""

from __future__ import annotations

import math

#: Versions in the time that the average looks back, ``1 / (1 − d)`` steps, at least. Fewer would
#: leave more of the steps' noise in it.
VERSIONS = 16


def coefficients(decay: float, steps: float) -> tuple[float, float]:
    """Return ``dᵏ`` and ``c`` for ``steps`` k > 0, which needn't be whole."""
    kept = decay**steps
    return kept, 1.0 + decay * math.expm1(steps * math.log(decay)) / (steps * (1.0 - decay))


def longest_interval(decay: float) -> float:
    """Return the most steps between two versions of which an average is made."""
    return max(1.0, 1.0 / ((1.0 - decay) * VERSIONS))
