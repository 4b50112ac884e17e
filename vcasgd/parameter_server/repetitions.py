"""Repetitions of volunteers' updates: their selection, their stages, and their consequences.

At most one is open at a time. It goes through three stages, each with a limit in time: the
update's worker uploads its states, a worker on a machine of one's own repeats the interval, and the
result counts for the owner.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.repetition import DIFFERENT, DIFFERENT_STATE, RepetitionJudge
from vcasgd.parameter_server.model_state import ModelState
from vcasgd.parameter_server.reports import Reports
from vcasgd.store.ledger.untrusted import Invalid
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.repetitions import (
    FRESH,
    WRONG_STATE,
    RepetitionExchange,
    RepetitionRequest,
    RepetitionResult,
    RepetitionTask,
    StateSizes,
)

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
#: Seconds until a worker has to answer that pushes nothing more, until a result is given up, and
#: without an update after which a worker isn't asked to repeat.
ANSWER_SECONDS, RESULT_SECONDS, RECENT_SECONDS = 600.0, 120.0, 60.0
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
    #: The update as it was decoded, float32 [floats]; None once both are stored.
    sent: Tensor | None
    fresh: bool
    since: float
    #: True if the worker of the update is lost.
    lost: bool = False
    later: int = 0
    tries: int = 0
    sizes: StateSizes | None = None
    task: RepetitionTask | None = None


class Repetitions:
    """Repetitions in a job with one shard. Methods with I/O raise as those of the client do.

    ``accuse`` gets an owner, why its work is wrong, and the version before what may be wrong.
    ``why_not`` says why there are none in this job, if that is so; in a job with several shards,
    only the first one ``tells`` it.
    """

    def __init__(
        self,
        exchange: RepetitionExchange,
        reports: Reports,
        accuse: Callable[[str, str, int], None],
        why_not: str | None,
        *,
        tells: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange = exchange
        self._reports = reports
        self._accuse = accuse
        self._why_not = why_not
        self._tells = tells
        self._clock = clock
        self._judge = RepetitionJudge()
        #: Workers that can repeat intervals → when each last pushed; and True once there was one.
        self._able: dict[str, float] = {}
        self._active = False
        #: Worker → digest of the state after its last applied update.
        self._states: dict[str, str] = {}
        #: Owner → version of its last update that was right; at first, of its first update.
        self._clean: dict[str, int] = {}
        self._versions: dict[int, KeptVersion] = {}
        self._selected: OpenRepetition | None = None
        self._open: OpenRepetition | None = None
        self._look_at = 0.0
        #: Updates of volunteers while nobody could repeat them.
        self._unrepeated = 0
        self._told: set[str] = set()

    # -- updates -------------------------------------------------------------------------------

    def own(self, header: Header) -> None:
        """Record an update of a machine of one's own."""
        if header.repeats and self._why_not is None:
            self._able[header.worker] = self._clock()
            self._active = True

    def check(self, owner: str, header: Header, model: ModelState) -> None:
        """Check that a volunteer's update continues from its last state, and select some updates.

        Raises :class:`InvalidUpdate`.
        """
        self._selected = None
        if not self._active:
            return
        known = self._states.get(header.worker)
        if not header.state_before or not header.state_after:
            raise InvalidUpdate("it doesn't name the states of its learner", reason=WRONG_STATE)
        if known is not None and header.state_before not in (known, FRESH):
            raise InvalidUpdate(
                "it doesn't continue from the state after the last one", reason=WRONG_STATE
            )
        if self._open is None and self._helpers() and secrets.randbelow(ONE_IN) == 0:
            self._select(owner, header, model)

    def applied(self, owner: str, header: Header, version: int) -> None:
        """Record a volunteer's update that was applied to ``version``."""
        self._clean.setdefault(owner, version)
        if not self._active:
            self._report_unrepeated()
            return
        self._states[header.worker] = header.state_after
        if self._open is not None and self._open.header.worker == header.worker:
            self._open.later += 1
        if self._selected is not None:
            self._open, self._selected = self._selected, None
            self._look_at = 0.0

    def remember(self, model: ModelState) -> None:
        """Keep the published model, from which workers train now."""
        version = model.meta.version
        if not self._clean or not self._active or version in self._versions:
            return
        followed = model.followed
        floats = followed.bfloat16().float() if model.meta.halves else followed.clone()
        self._versions[version] = KeptVersion(floats, model.meta.integers, model.meta.restorations)
        least, most = VERSIONS
        while len(self._versions) > min(most, max(least, VERSIONS_BYTES // (4 * len(floats)))):
            del self._versions[next(iter(self._versions))]

    def lose(self, workers: Collection[str]) -> None:
        """Wait for lost workers no longer."""
        for worker in workers:
            self._able.pop(worker, None)
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
        self._selected = OpenRepetition(
            owner,
            model.meta.version,
            header,
            RepetitionRequest(id=secrets.token_hex(8), worker=header.worker, update=header.update),
            base,
            sent,
            # A worker's first update of all.
            header.update.endswith(".1") and header.worker not in self._states,
            self._clock(),
        )

    def _helpers(self) -> list[str]:
        """Return the workers that can repeat an interval now, the busiest last."""
        since = self._clock() - RECENT_SECONDS
        return [each for each, at in self._able.items() if at >= since]

    def _report_unrepeated(self) -> None:
        self._unrepeated += 1
        if self._why_not is None and self._unrepeated < UNREPEATED:
            return
        why = self._why_not or "no machine of your own that can repeat them works for this job"
        self._tell("repetitions-off", f"updates of volunteers aren't repeated: {why}")

    def _tell(self, kind: str, text: str) -> None:
        if self._tells and kind not in self._told:
            self._told.add(kind)
            self._reports.add_event(kind, text)

    # -- the open repetition -------------------------------------------------------------------

    def turn(self) -> None:
        """Take the open repetition as far as its workers are."""
        if self._open is None or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_SECONDS
        if self._open.sent is not None:
            self._ask(self._open, self._open.sent)
        elif self._open.sizes is None:
            self._await_states(self._open)
        elif self._open.task is None:
            self._assign(self._open, self._open.sizes)
        else:
            self._await_result(self._open, self._open.task)

    def _ask(self, each: OpenRepetition, sent: Tensor) -> None:
        self._exchange.request(each.request, each.base.floats, sent)
        each.sent, each.since = None, self._clock()

    def _await_states(self, each: OpenRepetition) -> None:
        try:
            each.sizes = self._exchange.answer(each.request)
        except Invalid as error:
            self._end_wrong(each, f"its states can't be read: {error}")
            return
        if each.sizes is not None:
            each.since = self._clock()
        elif each.later >= MAX_LATER:
            self._end_wrong(each, "its worker doesn't upload its states")
        elif each.lost or self._clock() - each.since > ANSWER_SECONDS:
            self._judge.left(each.owner)
            self._end(each)

    def _assign(self, each: OpenRepetition, sizes: StateSizes) -> None:
        helpers = self._helpers()
        if each.tries >= MAX_ATTEMPTS or (
            not helpers and self._clock() - each.since > RESULT_SECONDS
        ):
            log.info("nobody could repeat update %s", each.header.update)
            self._end(each)
        elif helpers:
            each.tries += 1
            each.since = self._clock()
            each.task = RepetitionTask(
                id=each.request.id,
                by=helpers[each.tries % len(helpers)],
                header=each.header.model_dump_json(),
                integers=each.base.integers,
                restorations=each.base.restorations,
                sizes=sizes,
                fresh=each.fresh,
            )
            self._exchange.assign(each.task)

    def _await_result(self, each: OpenRepetition, task: RepetitionTask) -> None:
        try:
            result = self._exchange.result(task)
        except Invalid as error:
            log.warning("the result of %s can't be read: %s", task.by, error)
            each.task = None
            return
        if result is not None and result.outcome != "unable":
            self._take(each, result)
        elif (
            result is not None
            or task.by not in self._able
            or self._clock() - each.since > RESULT_SECONDS
        ):
            # Another one may be able to.
            each.task, each.since = None, self._clock()

    def _take(self, each: OpenRepetition, result: RepetitionResult) -> None:
        if result.outcome == "malformed":
            self._end_wrong(each, result.why)
        elif result.update > DIFFERENT:
            self._end_wrong(each, f"it differs by {result.update:.0%} from what it should be")
        elif result.state > DIFFERENT_STATE:
            self._end_wrong(each, f"the state after it differs by {result.state:.0%}")
        else:
            self._judge.right(each.owner)
            self._clean[each.owner] = each.version
            self._end(each)

    def _end_wrong(self, each: OpenRepetition, why: str) -> None:
        self._judge.wrong(each.owner)
        worker = each.header.worker
        text = f"a repeated update of {worker}, owner {each.owner}, is wrong: {why}"
        self._reports.add_event("repetition-failed", text, owner=each.owner, worker=worker)
        self._end(each)

    def _end(self, each: OpenRepetition) -> None:
        self._open = None
        self._exchange.end(each.request, len(each.base.floats), each.sizes)
        if self._judge.is_unclear:
            self._tell(
                "repetitions-unclear",
                "no repeated update is right, so nobody is accused: the task may depend on its "
                "machine",
            )
        if why := self._judge.accusation(each.owner):
            self._accuse(each.owner, why, self._clean[each.owner])
