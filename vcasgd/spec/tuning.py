"""The part ``tuning`` of a job: what it may set itself by what is measured while it trains.
:mod:`vcasgd.learning.tuning` has the decisions.
"""

from __future__ import annotations

from pydantic import Field

from vcasgd.spec.strict import StrictModel


class Tuning(StrictModel):
    """All of it is off unless it is asked for: with it a run depends on how fast its machines
    happened to be, and is not the same a second time.

    ``local_steps``: slower workers make fewer of them in a push interval, so that all push at the
    same rate. ``momentum``: that of the local optimizers is lowered by as much as asynchrony adds.
    ``mixing``: updates get less weight while validation worsens. ``learners_per_machine``: as many
    as raise a machine's throughput, and at most so many.
    """

    local_steps: bool = Field(default=False, strict=True)
    momentum: bool = Field(default=False, strict=True)
    mixing: bool = Field(default=False, strict=True)
    learners_per_machine: int = Field(default=1, ge=1, le=64, strict=True)

    @property
    def of_workers(self) -> bool:
        """Whether workers follow something that is measured."""
        return self.local_steps or self.momentum

    @property
    def of_job(self) -> bool:
        """Whether something is decided for the job as a whole."""
        return self.of_workers or self.mixing
