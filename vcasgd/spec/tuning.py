"""The section ``tuning`` of a job: settings that vcasgd may tune from measurements.

:mod:`vcasgd.learning.tuning` contains the decisions.
"""

from __future__ import annotations

from pydantic import Field

from vcasgd.spec.strict import StrictModel


class Tuning(StrictModel):
    """Settings that are tuned from measurements.

    All are off by default: with self-tuning, a run depends on the speed of its machines and can't
    be reproduced exactly. ``local_steps``: slower workers make fewer local steps in a push
    interval, so that all push at the same rate. ``momentum``: the momentum of local optimizers is
    reduced by the momentum that asynchrony adds. ``mixing``: updates get less weight while
    validation worsens. ``learners_per_machine``: the largest number of learners on a machine;
    learners are added while they raise its throughput.
    """

    local_steps: bool = Field(default=False, strict=True)
    momentum: bool = Field(default=False, strict=True)
    mixing: bool = Field(default=False, strict=True)
    learners_per_machine: int = Field(default=1, ge=1, le=64, strict=True)

    @property
    def of_workers(self) -> bool:
        """True if workers use tuned values."""
        return self.local_steps or self.momentum

    @property
    def of_job(self) -> bool:
        """True if the controller tunes values of the job."""
        return self.of_workers or self.mixing
