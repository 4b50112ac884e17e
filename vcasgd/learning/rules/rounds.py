"""The default rule: the mean of the workers' copies, round by round.

All workers of a round train from the same version ``W``. Their copies are averaged by samples, or
by the weights of their batches in samples (:mod:`vcasgd.learning.batch_weights`),
``W ← Σ nᵢwᵢ / Σ nᵢ = W + Σ nᵢΔᵢ / Σ nᵢ`` (local SGD, Stich 2018, arXiv 1805.09767), and the mean
is the next version. It is always between the copies, so the rule itself can't overshoot.

A round without some of the workers moves the model by the part of the job's batch that it has. An
update that missed its round counts in the next one. If it missed more than one, its weight is
divided by the number of missed rounds.

The job can also keep an exponential moving average of the parameters. A plain loop averages after
each step, ``e ← d·e + (1 − d)·w``. A parameter server sees a version ``w'`` only after k steps from
``w``. On a straight line between both, step i ends at ``w + (i/k)·Δ`` with ``Δ = w' − w``, and the
k steps of the plain loop add up to ``e ← dᵏ·e + (1 − dᵏ)·w + c·Δ`` with
``c = 1 − d·(1 − dᵏ) / (k·(1 − d))``.
"""

from __future__ import annotations

import math

from torch import Tensor

from vcasgd.learning.rules.base import Context, Payload, Rule

#: Times the mean weight of the job's first batch that a sample of an update may have, so that no
#: worker can make its own updates count for those of all others.
MAX_HEAVIER = 16.0

#: Versions in the time that the average looks back, ``1 / (1 − d)`` steps, at least. Fewer would
#: leave more of the steps' noise in it.
VERSIONS = 16


class Rounds(Rule):
    """``Context.state`` collects ``Σ nᵢΔᵢ``, and :meth:`finish` adds it.

    Running statistics arrive as values; the sum has their difference to W.
    """

    payload = Payload.DELTA
    rounds = True

    def blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        """Add an update to the sum; return its weight in samples. W doesn't change."""
        assert context.state is not None
        start = max(context.parameters, 0)
        context.state[:start].add_(update[:start], alpha=context.samples)
        context.state[start:].add_(update[start:] - weights[start:], alpha=context.samples)
        return context.samples

    @staticmethod
    def finish(weights: Tensor, total: Tensor, samples: float, factor: float) -> None:
        """Add the mean of a round, ``factor · total / samples``; vectors are float32 ``[n]``."""
        weights.add_(total, alpha=factor / samples)


def round_weight(samples: float, missed: float) -> float:
    """Return the weight of an update, in samples, that is ``missed`` rounds late."""
    return samples / max(missed, 1.0)


def average_coefficients(decay: float, steps: float) -> tuple[float, float]:
    """Return ``dᵏ`` and ``c`` for ``steps`` k > 0, which needn't be whole."""
    kept = decay**steps
    return kept, 1.0 + decay * math.expm1(steps * math.log(decay)) / (steps * (1.0 - decay))


def longest_interval(decay: float) -> float:
    """Return the most steps between two versions of which an average is made."""
    return max(1.0, 1.0 / ((1.0 - decay) * VERSIONS))
