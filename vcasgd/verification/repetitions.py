"""Repetitions of volunteers' updates: their selection, their stages, and their consequences.

At most one is open at a time. It goes through three stages, each with a limit in time: the
update's worker uploads its states, a worker on a machine of the cluster repeats the interval, and
the result counts for the owner.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor

from vcasgd.errors import InvalidUpdate, StoreError
from vcasgd.parameter_server.blend import ModelState
from vcasgd.parameter_server.reports import Reports
from vcasgd.store.ledger.untrusted import Invalid
from vcasgd.store.tensors.header import Header
from vcasgd.verification.exchange import (
    RESULT_SECONDS,
    WRONG_STATE,
    Claims,
    RepetitionExchange,
    RepetitionRequest,
    RepetitionResult,
    RepetitionTask,
    StateSizes,
)
from vcasgd.verification.judge import DIFFERENT, DIFFERENT_STATE, RepetitionJudge, RepetitionOutcome
from vcasgd.verification.state import FRESH

log = logging.getLogger(__name__)

#: Updates of volunteers of which one is repeated, on average.
ONE_IN = 32
#: Published versions whose models are kept, because late updates are based on them: at least and at
#: most, and the bytes that limit their number in between.
VERSIONS, VERSIONS_BYTES = (2, 64), 1 << 28
#: Vectors of the model's size that a repetition takes on the tensors server: base, update, and
#: two states of at most four vectors, those of Adam with local batches.
VECTORS = 10
#: Later updates of a worker without an answer from which it refuses to answer. It looks for
#: requests before each interval, so an honest one has pushed at most two.
MAX_LATER = 4
#: Seconds until a worker has to answer that pushes nothing more, and without an update after which
#: a worker isn't asked to repeat.
ANSWER_SECONDS, RECENT_SECONDS = 600.0, 60.0
#: Workers that are asked to repeat one interval, one after the other.
MAX_ATTEMPTS = 3
#: Seconds between two looks for an answer.
LOOK_SECONDS = 0.1
#: Updates of volunteers after which an event says that nobody repeats them.
UNREPEATED = 64


@dataclass(frozen=True)
class KeptVersion:
    """A published model as workers fetch it: float32 [floats], and its counters in base64."""

    floats: Tensor
    integers: str
    restorations: int


@dataclass
class OpenRepetition:
    """A repetition in progress of an owner's update, which was applied to ``version``."""

    owner: str
    version: int
    header: Header
    request: RepetitionRequest
    base: KeptVersion
    since: float
    #: True if the worker of the update is lost.
    lost: bool = False
    later: int = 0
    tries: int = 0
    sizes: StateSizes | None = None
    task: RepetitionTask | None = None


class Repetitions:
    """Repetitions in a job with one shard.

    ``accuse`` gets an owner, why its work is wrong, and the version before what may be wrong.
    ``why_not`` says why there are none in this job, if that is so; in a job with several shards,
    only the first one ``announces`` it.
    """

    def __init__(
        self,
        exchange: RepetitionExchange,
        reports: Reports,
        accuse: Callable[[str, str, int], None],
        why_not: str | None,
        *,
        announces: bool = True,
    ) -> None:
        self._exchange = exchange
        self._reports = reports
        self._accuse = accuse
        self._why_not = why_not
        self._announces = announces
        self._announced: set[str] = set()
        self._judge = RepetitionJudge()
        #: Workers that can repeat intervals → when each last pushed; and True once there was one.
        self._helpers: dict[str, float] = {}
        self._active = False
        #: Worker → digest of the state after its last applied update.
        self._states: dict[str, str] = {}
        #: Owner → version of its last update that was right; at first, of its first update.
        self._clean: dict[str, int] = {}
        self._versions: dict[int, KeptVersion] = {}
        #: The repetition of the update that is being checked, and that update, float32 [floats].
        self._selected: tuple[OpenRepetition, Tensor] | None = None
        self._open: OpenRepetition | None = None
        self._look_at = 0.0
        #: Updates of volunteers while nobody could repeat them.
        self._unrepeated = 0

    # -- updates -------------------------------------------------------------------------------

    def note_helper(self, header: Header) -> None:
        """Note whether the worker of an update, on a machine of the cluster, can repeat others."""
        if self._why_not is None and Claims.of(header).repeats:
            self._helpers[header.worker] = time.monotonic()
            self._active = True

    def check(self, owner: str, header: Header, model: ModelState) -> None:
        """Check that a volunteer's update continues from its last state, and select some updates.

        Raises :class:`InvalidUpdate`.
        """
        self._selected, claims = None, Claims.of(header)
        if not self._active:
            return
        if not claims.before or not claims.after:
            raise InvalidUpdate("it doesn't name the states of its learner", reason=WRONG_STATE)
        if claims.before not in (self._states.get(header.worker), FRESH):
            raise InvalidUpdate(
                "it doesn't continue from the state after the last one", reason=WRONG_STATE
            )
        if self._open is None and self._recent_helpers() and secrets.randbelow(ONE_IN) == 0:
            self._select(owner, header, model)

    def applied(self, owner: str, header: Header, version: int) -> None:
        """Record a volunteer's update that was applied to ``version``.

        If it is to be repeated, its worker is asked at once: it has to see that before it sees
        that the update was applied.
        """
        self._clean.setdefault(owner, version)
        self._states[header.worker] = Claims.of(header).after
        if not self._active:
            self._announce_unrepeated()
            return
        if self._open is not None and self._open.header.worker == header.worker:
            self._open.later += 1
        if self._selected is not None:
            (selected, sent), self._selected = self._selected, None
            try:
                self._exchange.request(selected.request, selected.base.floats, sent)
            except StoreError as error:
                log.info("update %s isn't repeated: %s", header.update, error)
                return
            self._open, self._look_at = selected, 0.0

    def lose(self, workers: Collection[str]) -> None:
        """Wait for lost workers no longer."""
        for worker in workers:
            self._helpers.pop(worker, None)
        if self._open is not None and self._open.header.worker in workers:
            self._open.lost = True

    def restart(self) -> None:
        """Forget states and versions, because the model went back."""
        self._states.clear()
        self._versions.clear()
        self._selected = None

    def _select(self, owner: str, header: Header, model: ModelState) -> None:
        base = self._versions.get(header.base)
        if base is None or not self._exchange.has_room(VECTORS * 4 * len(base.floats)):
            return
        sent = model.step_of(header)
        sent[model.parameters :] += model.weights[model.parameters :]
        names = {"worker": header.worker, "update": header.update}
        repetition = OpenRepetition(
            owner,
            model.meta.version,
            header,
            RepetitionRequest(id=secrets.token_hex(8), **names),
            base,
            time.monotonic(),
        )
        self._selected = repetition, sent

    def _recent_helpers(self) -> list[str]:
        """Return the workers that can repeat an interval now."""
        since = time.monotonic() - RECENT_SECONDS
        return [worker for worker, at in self._helpers.items() if at >= since]

    def _announce_unrepeated(self) -> None:
        self._unrepeated += 1
        if self._why_not is None and self._unrepeated < UNREPEATED:
            return
        why = self._why_not or "no machine of your own that can repeat them works for this job"
        self._announce("repetitions-off", f"updates of volunteers aren't repeated: {why}")

    def _announce(self, kind: str, text: str) -> None:
        if self._announces and kind not in self._announced:
            self._announced.add(kind)
            self._reports.add_event(kind, text)

    # -- the open repetition -------------------------------------------------------------------

    def turn(self, model: ModelState) -> None:
        """Keep the published model, and take the open repetition as far as its workers are.

        Call it before updates are applied. Raises as the client does.
        """
        self._keep(model)
        repetition, now = self._open, time.monotonic()
        if repetition is None or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if repetition.sizes is None:
            self._await_states(repetition)
        elif repetition.task is None:
            self._assign(repetition, repetition.sizes)
        else:
            self._await_result(repetition, repetition.task)

    def _keep(self, model: ModelState) -> None:
        """Keep the model that workers train from now on, unless updates are already on top."""
        version = model.meta.version
        if model.batch.pending or version in self._versions or not (self._clean and self._active):
            return
        followed = model.followed
        floats = followed.bfloat16().float() if model.meta.halves else followed.clone()
        self._versions[version] = KeptVersion(floats, model.meta.integers, model.meta.restorations)
        least, most = VERSIONS
        while len(self._versions) > min(most, max(least, VERSIONS_BYTES // (4 * len(floats)))):
            del self._versions[next(iter(self._versions))]

    def _await_states(self, repetition: OpenRepetition) -> None:
        now = time.monotonic()
        try:
            repetition.sizes = self._exchange.answer(repetition.request)
        except Invalid as error:
            self._end_wrong(repetition, f"its states can't be read: {error}")
            return
        if repetition.sizes is not None:
            repetition.since = now
        elif repetition.later >= MAX_LATER:
            self._end_wrong(repetition, "its worker doesn't upload its states")
        elif repetition.lost or now - repetition.since > ANSWER_SECONDS:
            self._end(repetition, RepetitionOutcome.LEFT)

    def _assign(self, repetition: OpenRepetition, sizes: StateSizes) -> None:
        helpers, now = self._recent_helpers(), time.monotonic()
        late = not helpers and now - repetition.since > RESULT_SECONDS
        if repetition.tries >= MAX_ATTEMPTS or late:
            log.info("nobody could repeat update %s", repetition.header.update)
            self._end(repetition)
        elif helpers:
            repetition.tries += 1
            repetition.since = now
            repetition.task = RepetitionTask(
                id=repetition.request.id,
                by=helpers[repetition.tries % len(helpers)],
                header=repetition.header.model_dump_json(),
                integers=repetition.base.integers,
                restorations=repetition.base.restorations,
                sizes=sizes,
            )
            self._exchange.assign(repetition.task)

    def _await_result(self, repetition: OpenRepetition, task: RepetitionTask) -> None:
        late = time.monotonic() - repetition.since > RESULT_SECONDS
        try:
            result = self._exchange.result(task)
        except Invalid as error:
            log.warning("the result of %s can't be read: %s", task.by, error)
            repetition.task = None
            return
        if result is not None and result.outcome != "unable":
            self._take(repetition, result)
        elif result is not None or task.by not in self._helpers or late:
            # Another one may be able to.
            repetition.task, repetition.since = None, time.monotonic()

    def _take(self, repetition: OpenRepetition, result: RepetitionResult) -> None:
        if result.outcome == "malformed":
            self._end_wrong(repetition, result.why)
        elif result.update > DIFFERENT:
            self._end_wrong(repetition, f"it differs by {result.update:.0%} from what it should be")
        elif result.state > DIFFERENT_STATE:
            self._end_wrong(repetition, f"the state after it differs by {result.state:.0%}")
        else:
            self._clean[repetition.owner] = repetition.version
            self._end(repetition, RepetitionOutcome.RIGHT)

    def _end_wrong(self, repetition: OpenRepetition, why: str) -> None:
        owner, worker = repetition.owner, repetition.header.worker
        text = f"a repeated update of {worker}, owner {owner}, is wrong: {why}"
        self._reports.add_event("repetition-failed", text, owner=owner, worker=worker)
        self._end(repetition, RepetitionOutcome.WRONG)

    def _end(self, repetition: OpenRepetition, outcome: RepetitionOutcome | None = None) -> None:
        owner, self._open = repetition.owner, None
        if outcome is not None:
            self._judge.count(owner, outcome)
        self._exchange.end(repetition.request, len(repetition.base.floats), repetition.sizes)
        if self._judge.is_unclear:
            self._announce(
                "repetitions-unclear",
                "no repeated update is right, so nobody is accused: the task may depend on its "
                "machine",
            )
        if why := self._judge.accusation(owner):
            self._accuse(owner, why, self._clean[owner])
