"""Hook for the verification of volunteers' updates; :mod:`vcasgd.verification` fills it.

The core imports nothing else of that package, and works without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module

from vcasgd.parameter_server.blend import ModelState
from vcasgd.parameter_server.reports import Reports
from vcasgd.spec.job import JobSpec
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.header import Header


class ServerVerification:
    """Judgement of one shard's updates. This one accepts all of them."""

    def turn(self, model: ModelState) -> None:
        """Do what is pending, before updates are applied. Raises as the tensors client does."""

    def check(self, header: Header, model: ModelState) -> None:
        """Judge an update that was received and checked, before it is blended.

        Raises :class:`~vcasgd.errors.InvalidUpdate`, and
        :class:`~vcasgd.errors.StoreUnavailable` while it can't be judged.
        """

    def applied(self, header: Header, version: int) -> None:
        """Record that the update that was checked last was applied to ``version``."""

    def restart(self) -> None:
        """Forget what updates looked like, because the model went back."""

    def lose(self, workers: Collection[str]) -> None:
        """Wait for lost workers no longer."""

    def exclude(self, owners: Iterable[str]) -> None:
        """Refuse all updates of owners that a shard has accused."""


def verification_of(
    spec: JobSpec,
    keys: TensorKeys,
    shards: int,
    ledger: RedisClient,
    tensors: RedisClient,
    reports: Reports,
) -> ServerVerification:
    """Return the judge of the updates of one of a job's shards."""
    try:
        module = import_module("vcasgd.verification.server")
    except ModuleNotFoundError as error:
        if error.name != "vcasgd.verification":
            raise
        return ServerVerification()
    verification: ServerVerification = module.VolunteerVerification(
        spec, keys, shards, ledger, tensors, reports
    )
    return verification
