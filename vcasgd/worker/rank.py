"""Process of a further rank of a worker: ``python -m vcasgd.worker.rank``; see
:mod:`vcasgd.worker.ranks`, whose messages it follows until its parent ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import numpy as np
import torch

from vcasgd.errors import RankLost, VcasgdError
from vcasgd.fork_server import die_with
from vcasgd.learning.rank_group import RankGroup
from vcasgd.learning.sharded_model import ShardedModel
from vcasgd.learning.vector import MappedVector
from vcasgd.session.script import load
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.task.task import calling_user_code, use_base
from vcasgd.worker.gpus import best_device
from vcasgd.worker.ranked_learner import FollowingLearner
from vcasgd.worker.ranks import (
    LoadIntegers,
    LoadPart,
    RankEvaluation,
    RankFailed,
    RankInterval,
    RankMetrics,
    RankReady,
    ReadPart,
    ShiftPart,
    StartRank,
    StepMade,
)


class Rank:
    """Follows the first rank's messages. Methods raise :class:`EOFError` once it has ended."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        start = connection.recv()
        assert isinstance(start, StartRank)
        torch.set_num_threads(start.threads)
        spec, device = JobSpec.model_validate(start.spec), best_device()
        use_base(start.base)
        task = load(spec.task, spec.args, start.code)
        self._learner = FollowingLearner(spec, task, device)
        self._learner.check_against(ModelFacts(**start.facts))
        connection.send(RankReady())
        connection.recv()
        self._learner.join(
            RankGroup.connect(
                *(start.rank, start.size, start.meeting, start.timeout, device),
                lambda error: RankLost(str(error)),
                sharded=self._learner.sharded,
            )
        )
        connection.send(RankReady())

    def follow(self) -> None:
        """Follow the messages until the first rank has ended."""
        while True:
            match self._connection.recv():
                case RankInterval() as order:
                    self._connection.send(self._learner.follow(order, self._await_step()))
                case RankEvaluation(rehearses):
                    steps = self._await_step()
                    metrics = self._learner.follow_evaluation(steps, rehearses=rehearses)
                    self._connection.send(RankMetrics(metrics))
                case message:
                    self._apply(message)

    def _await_step(self) -> Callable[[], bool]:
        """Return a function that waits for the first rank's next step; True at the last one."""

        def await_step() -> bool:
            while not isinstance(message := self._connection.recv(), StepMade):
                self._apply(message)
            return message.stop

        return await_step

    def _apply(self, message: object) -> None:
        model = self._learner.model
        match message:
            case ShiftPart():
                model.shift_part(self._memory(message), message.first)
            case ReadPart():
                out, origin = self._memory(message), None
                if message.origin is not None:
                    origin = self._memory(replace(message, start=message.origin))
                assert isinstance(model, ShardedModel)
                model.read_own_part(out, message.first, origin)
            case LoadPart():
                model.load_part(self._memory(message), message.first)
            case LoadIntegers(integers):
                whole = np.frombuffer(bytearray(integers), np.int64)
                model.load_integers(torch.from_numpy(whole))
            case _:
                raise AssertionError(message)
        self._connection.send(RankReady())

    def _memory(self, order: LoadPart) -> MappedVector:
        """Return the memory whose descriptor comes next."""
        return MappedVector.of_file(recv_handle(self._connection), order.start, order.floats)


def main() -> int:
    """Run a rank. The arguments are a file descriptor and the parent's process number."""
    connection, parent = map(int, sys.argv[1:])
    die_with(parent)
    messages = Connection(connection)
    try:
        Rank(messages).follow()
    except (EOFError, OSError):
        return 0
    except RankLost:
        # The first rank knows which one.
        return 1
    except VcasgdError as error:
        messages.send(RankFailed(error))
    except Exception as error:  # noqa: BLE001 - reported to the first rank
        messages.send(RankFailed(calling_user_code("a further rank", error)))
    return 1


if __name__ == "__main__":
    sys.exit(main())
