"""Exchange of an interval that is repeated: a request, states, a task, and a result.

The parameter server asks the worker that made an update for its states before and after the
interval, and then a worker on a machine of the cluster to repeat it. Workers write only under their
own names, so nobody answers for another one. Everything expires.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.limits import MAX_HEADER_BYTES
from vcasgd.store.bulk_transfer import BulkTransfer, Missing, WrongLength
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.untrusted import Content, Invalid, Text, parse
from vcasgd.store.tensors.chunks import bytes_of, chunk_count, chunks_of
from vcasgd.store.tensors.header import Header

#: Reason of the rejection of an update that does not continue from its worker's last state.
WRONG_STATE = "state"
#: Part of the server's memory limit up to which repetitions may use it.
USABLE = 0.8
#: Seconds after which what belongs to a repetition expires.
KEPT_SECONDS = 900
#: Seconds until a result is given up. A hostile interval may have any number of steps.
RESULT_SECONDS = 120.0
#: Bytes of a result or of sizes; longer ones aren't read.
MAX_ANSWER_LENGTH = 1 << 10
#: Bytes of a task, which contains an update's header.
MAX_TASK_LENGTH = 1 << 21
#: Largest relative difference in a result; any larger one counts as much.
MAX_DIFFERENCE = 1e9
#: Vectors that belong to a repetition, and states that a worker uploads.
VectorName = Literal["base", "sent"]
StateName = Literal["before", "after"]

Answer = TypeVar("Answer", bound=Content)
_Id = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,150}$")]
_Bytes = Annotated[int, Field(gt=0, le=1 << 40)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
_Difference = Annotated[float, Field(ge=0, le=MAX_DIFFERENCE, allow_inf_nan=False)]


class Claims(Content):
    """Claims of an update's header for verification.

    ``planned`` is the sample where the interval was to stop, at its end or after it. ``before`` and
    ``after`` are digests of the learner's states around the interval, by which a volunteer's worker
    commits to them. ``repeats`` is True if the worker can repeat intervals of others.
    """

    planned: _Count = 0
    before: _Digest = ""
    after: _Digest = ""
    repeats: bool = False

    @classmethod
    def of(cls, header: Header) -> Claims:
        """Return the claims of an update. Raises :class:`~vcasgd.errors.InvalidUpdate`."""
        try:
            return parse(cls, header.claims.encode(), MAX_ANSWER_LENGTH) if header.claims else cls()
        except Invalid as error:
            raise InvalidUpdate(f"header: claims: {error}", reason="header") from error


class RepetitionRequest(Content):
    """Request to the worker of an update to upload its states."""

    id: _Id
    worker: _Name
    update: _Name


class StateSizes(Content):
    """Sizes of uploaded states in bytes."""

    before: _Bytes
    after: _Bytes


class RepetitionTask(Content):
    """Request to the worker ``by`` to repeat the interval of an update.

    ``header`` is that of the update, as JSON; ``integers`` is base64 of the base's counters.
    """

    id: _Id
    by: _Name
    header: Annotated[str, Field(max_length=MAX_HEADER_BYTES)]
    integers: str
    restorations: Annotated[int, Field(ge=0)]
    sizes: StateSizes

    @property
    def update(self) -> Header:
        """The update's header. Raises :class:`~vcasgd.errors.InvalidUpdate`."""
        return Header.parse(self.header.encode())


class RepetitionResult(Content):
    """Result of a repetition: the relative differences of the update and of the state after.

    ``why`` says what else was wrong, or why the interval could not be repeated.
    """

    outcome: Literal["repeated", "malformed", "unable"]
    update: _Difference = 0.0
    state: _Difference = 0.0
    why: Text = ""


class RepetitionExchange:
    """Repetitions of one shard's updates. Methods raise as those of the client do."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys) -> None:
        self._tensors = tensors
        self._keys = keys
        self._transfer = BulkTransfer(tensors)

    # -- for the parameter server --------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Return True if the server has so many bytes to spare."""
        memory = self._tensors.info("memory")
        limit = int(memory["maxmemory"]) * USABLE
        return not limit or int(memory["used_memory"]) + size <= limit

    def request(self, request: RepetitionRequest, base: Tensor, sent: Tensor) -> None:
        """Store the base of an interval and its update, float32 [floats], and ask for states."""
        self._store(self._vector_keys(request.id, "base", base.numel()), base)
        self._store(self._vector_keys(request.id, "sent", sent.numel()), sent)
        self._set(self._keys.repetition("request"), request)

    def answer(self, request: RepetitionRequest) -> StateSizes | None:
        """Return the sizes of the states that the worker uploaded; None if it hasn't.

        Raises :class:`~vcasgd.store.ledger.untrusted.Invalid`.
        """
        return self._read(StateSizes, self._sizes_key(request.worker, request.id))

    def assign(self, task: RepetitionTask) -> None:
        """Ask a worker to repeat the interval."""
        self._set(self._keys.repetition("task"), task)

    def result(self, task: RepetitionTask) -> RepetitionResult | None:
        """Return the result of the worker that was asked; None if there is none.

        Raises :class:`~vcasgd.store.ledger.untrusted.Invalid`.
        """
        return self._read(RepetitionResult, self._result_key(task))

    def end(self, request: RepetitionRequest, floats: int, sizes: StateSizes | None) -> None:
        """Delete what belongs to a repetition of a shard with so many floats."""
        keys = [self._keys.repetition("request"), self._keys.repetition("task")]
        keys += self._vector_keys(request.id, "base", floats)
        keys += self._vector_keys(request.id, "sent", floats)
        keys.append(self._sizes_key(request.worker, request.id))
        if sizes is not None:
            keys += self._state_keys(request.worker, request.id, "before", sizes.before)
            keys += self._state_keys(request.worker, request.id, "after", sizes.after)
        self._tensors.unlink(*keys)

    # -- for the worker of the update ----------------------------------------------------------

    def requested(self) -> RepetitionRequest | None:
        """Return the present request, to any worker."""
        text = self._tensors.get(self._keys.repetition("request"))
        return None if text is None else parse(RepetitionRequest, text, MAX_ANSWER_LENGTH)

    def upload(self, request: RepetitionRequest, before: Tensor, after: Tensor) -> None:
        """Upload the states around the interval, uint8 [n] each."""
        names = request.worker, request.id
        self._store(self._state_keys(*names, "before", len(before)), before)
        self._store(self._state_keys(*names, "after", len(after)), after)
        self._set(self._sizes_key(*names), StateSizes(before=len(before), after=len(after)))

    # -- for the worker that repeats it --------------------------------------------------------

    def task(self) -> RepetitionTask | None:
        """Return the present task, of any worker."""
        text = self._tensors.get(self._keys.repetition("task"))
        return None if text is None else parse(RepetitionTask, text, MAX_TASK_LENGTH)

    def vector(self, task: RepetitionTask, name: VectorName, floats: int) -> Tensor:
        """Return the base of the interval or the update as it was decoded, float32 [floats].

        Raises :class:`~vcasgd.store.ledger.untrusted.Invalid` if it is gone.
        """
        return self._load(self._vector_keys(task.id, name, floats), torch.empty(floats), name)

    def state(self, task: RepetitionTask, name: StateName, limit: int) -> Tensor:
        """Return an uploaded state, uint8 [n], of at most so many bytes. It can be anything.

        Raises :class:`~vcasgd.store.ledger.untrusted.Invalid`.
        """
        size = task.sizes.before if name == "before" else task.sizes.after
        if size > limit:
            raise Invalid(f"the state {name} has {size} bytes, at most {limit} are possible")
        keys = self._state_keys(task.update.worker, task.id, name, size)
        return self._load(keys, torch.empty(size, dtype=torch.uint8), name)

    def report(self, task: RepetitionTask, result: RepetitionResult) -> None:
        """Store the result under this worker's name."""
        self._set(self._result_key(task), result)

    # -- keys and their content ----------------------------------------------------------------

    def _store(self, keys: Sequence[str], vector: Tensor) -> None:
        items = zip(keys, chunks_of(bytes_of(vector)), strict=True)
        self._transfer.store(items, expire=KEPT_SECONDS)

    def _load(self, keys: Sequence[str], out: Tensor, name: str) -> Tensor:
        try:
            for _ in self._transfer.load(keys, chunks_of(bytes_of(out))):
                pass
        except Missing as error:
            raise Invalid(f"a part of {name} is missing") from error
        except WrongLength as error:
            raise Invalid(f"chunk {error.index} of {name} is {error.value}") from error
        return out

    def _set(self, key: str, content: Content) -> None:
        self._tensors.set(key, content.model_dump_json(), ex=KEPT_SECONDS)

    def _read(self, model: type[Answer], key: str) -> Answer | None:
        # A worker may have stored a string of any length.
        text = bytes(self._tensors.getrange(key, 0, MAX_ANSWER_LENGTH))
        return parse(model, text, MAX_ANSWER_LENGTH) if text else None

    def _vector_keys(self, number: str, name: VectorName, floats: int) -> list[str]:
        count = chunk_count(floats * 4)
        return [self._keys.repetition(f"{number}.{name}.{index}") for index in range(count)]

    def _state_keys(self, worker: str, number: str, name: StateName, size: int) -> list[str]:
        prefix = f"{worker}.states.{number}.{name}"
        return [self._keys.payload_chunk(prefix, index) for index in range(chunk_count(size))]

    def _sizes_key(self, worker: str, number: str) -> str:
        return self._keys.payload_chunk(f"{worker}.states.{number}", 0)

    def _result_key(self, task: RepetitionTask) -> str:
        return self._keys.payload_chunk(f"{task.by}.result.{task.id}", 0)
