"""Hook for the verification of volunteers' work; :mod:`vcasgd.verification` fills it.

The core imports nothing else of that package, and works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from vcasgd.worker import WorkerContext
from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner


class WorkerVerification:
    """Duties of a worker around its intervals, so that its work, or others', can be verified.

    This one has none. The training thread calls it.
    """

    #: True if a new optimizer may take over second moments of other workers.
    adopts = True
    #: True if an interval may start from a version and an own update that the version lacks.
    overlaps = True

    def serve(self, learner: Learner) -> bool:  # noqa: ARG002
        """Do what the parameter server asks for, before an interval; return True if that was
        anything.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        return False

    def begin(self, learner: Learner, base: Base) -> None:
        """Prepare for an interval from a base, which follows at once."""

    def end(self, learner: Learner, update: str, planned: int) -> str:  # noqa: ARG002
        """Return what the header of the interval's ``update`` claims; it was to end at
        ``planned``."""
        return ""

    def rejected(self, reason: str) -> None:
        """Record why an update of this worker was rejected."""


def verification_of(context: WorkerContext, after_step: Callable[[], bool]) -> WorkerVerification:
    """Return what a worker has to do for verification.

    ``after_step`` is to be called after each local step, and is True once the worker has to leave.
    """
    try:
        side = "recorder" if context.settings.volunteer else "verifier"
        module = import_module(f"vcasgd.verification.{side}")
    except ModuleNotFoundError as error:
        if error.name != "vcasgd.verification":
            raise
        return WorkerVerification()
    verification: WorkerVerification
    names = context.nodes[0], context.job, context.name
    if context.settings.volunteer:
        verification = module.StateRecorder(*names)
    else:
        verification = module.Verifier(*names, after_step)
    return verification
