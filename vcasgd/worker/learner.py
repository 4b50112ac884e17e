"""The part of a worker that trains one model on pieces of the data; no network."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.errors import NonFiniteLoss, SpecError
from vcasgd.learning.bad_samples import BadSamples
from vcasgd.learning.batch_source import BatchSource, SampleRange
from vcasgd.learning.divergence import learning_rate_factor
from vcasgd.learning.draws import seed_for
from vcasgd.learning.encodings import BFloat16, Float32
from vcasgd.learning.encodings.rows import NAME as ROWS
from vcasgd.learning.gradient_hooks import are_hooked, step_hooks
from vcasgd.learning.layout import Layout
from vcasgd.learning.local_batch import most_workers
from vcasgd.learning.local_model import LocalModel
from vcasgd.learning.mean_gradients import RESTART, MeanGradients, moments_of
from vcasgd.learning.model_evaluation import (
    EvaluationPart,
    Metrics,
    evaluate_part,
    means_of,
    rehearse_evaluation,
)
from vcasgd.learning.optimizers import as_optimizer, check_workers, name_of, set_mode
from vcasgd.learning.precision import StepPrecision
from vcasgd.learning.rank_group import RankGroup
from vcasgd.learning.rates import Rates, clip
from vcasgd.learning.rules import Payload, interval_start, longest_interval, make_rule
from vcasgd.learning.shards import SMALL_FLOATS, Cut, ShardRange
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.learning.training import Interval, batch_size_of, set_seed, train
from vcasgd.learning.tuning import Momenta, local_steps
from vcasgd.learning.vector import Floats, is_sound
from vcasgd.spec.job import JobSpec
from vcasgd.spec.problems import did_you_mean
from vcasgd.spec.sections import EMA_PREFIX
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.task.logged import collected
from vcasgd.task.task import Task, user_code
from vcasgd.worker.findings import Findings
from vcasgd.worker.interval import Base, Trained
from vcasgd.worker.member import Member
from vcasgd.worker.update_queue import MAX_UNAPPLIED
from vcasgd.worker.vectors import await_device

log = logging.getLogger(__name__)

#: Subtasks at the end of a job, for each of its workers, whose last update carries everything that
#: the encoding has kept back. A worker gets one of them even if it is that many times slower than
#: the others.
LAST_SUBTASKS = 4


class Learner:
    """A task's model, which is loaded from vectors and read into vectors."""

    def __init__(self, spec: JobSpec, task: Task, device: torch.device | str) -> None:
        #: The job's specification, and the user's code.
        self.spec, self.task = spec.with_gpus(1), task
        self.device = device
        task.skips_bad_samples = spec.skips_bad_samples
        task.follow_job(self.spec)
        self._model = self._build_model()
        #: Facts of the job. Its first worker finds them out, and the others follow them.
        self.findings = Findings(self.spec, task, self._model, device, self._new_optimizer)
        self._rule = make_rule(spec.update)
        #: This worker's own copy, float32 [floats], if the rule keeps one.
        self._local: Floats | None = None
        #: The local optimizer; None before the first subtask.
        self.optimizer: Optimizer | None = None
        self._rates: Rates | None = None
        self._momenta: Momenta | None = None
        #: Rollbacks before the last base.
        self.rollbacks = self._divergences = 0
        #: This worker's part in the job's rounds, if the rule has any.
        self._member: Member | None = None
        #: The ``share`` of the last interval.
        self._share = 1.0
        self._precision = StepPrecision(task, device)
        #: Steps with the mean gradients of rounds, if the updates have gradients.
        self._mean_gradients: MeanGradients | None = None
        #: Vectors that had been loaded into the model at the end of the last interval; −1 while
        #: there is none.
        self._loads = -1
        #: Samples of the job before the next local step; None if that is the place of its samples.
        self._applied: int | None = None
        #: Processes that train every batch together with this one.
        self._group: RankGroup | None = None
        #: Where the last interval ended in the order of an epoch; None if that is unknown.
        self._place: tuple[int, int] | None = None

    def _build_model(self) -> LocalModel:
        return LocalModel(self.task, self.spec.seed, self.device)

    @property
    def maps_vectors(self) -> bool:
        """True if this process can't have the whole vector of the model."""
        return False

    @property
    def layout(self) -> Layout:
        """The layout of the model's vectors."""
        return self.findings.layout

    @property
    def plan(self) -> EpochPlan:
        """The division of the job into subtasks; see :attr:`Findings.plan`."""
        return self.findings.plan

    def cut(self, shards: int) -> Cut:
        """Return how the vector is cut into ``shards``."""
        return Cut(self.layout.floats, self.layout.parameters, shards)

    def initial(self) -> tuple[Floats, Tensor]:
        """Return the model before any training: float32 [floats] and int64 [k]."""
        return self._model.initial()

    # -- what the job's first worker finds out -------------------------------------------------

    def facts(self, nodes: int, *, verified: bool = False) -> ModelFacts:
        return self.findings.facts(nodes, verified=verified, mapped=self.maps_vectors)

    def check_against(self, facts: ModelFacts) -> None:
        self.findings.check_against(facts)

    def rehearse(self, on_progress: Callable[[], None]) -> None:
        """Make a local step, which is undone, and evaluate one batch, so that a mistake shows
        before the first epoch is trained.

        Calls ``on_progress`` between them. Raises :class:`SpecError` if the evaluation lacks the
        metric that the job names, and errors of the user's code.
        """
        # Loops, trainers, and several processes count their steps themselves.
        if self.task.repeatable and self.spec.workers.gpus == 1:
            self.findings.trial.rehearse()
        on_progress()
        names = self._rehearse()
        chosen = self.spec.stop.chosen_metric
        if chosen is not None and chosen.name not in names:
            raise SpecError(
                f"stop.metric: evaluate returns {', '.join(names)}, and no {chosen.name}",
                remedy=did_you_mean(chosen.name, names) or "name one of them, or return it",
                field="stop.metric",
            )

    def _rehearse(self) -> list[str]:
        found = self.findings.validation_set
        return rehearse_evaluation(self.task, self._model.module, found, self.device)

    # -- training and evaluation ---------------------------------------------------------------

    def start_subtask(self) -> None:
        """Create a new local optimizer, unless the job keeps the optimizer's state.

        A kept momentum belongs to an older model, but without momentum the first steps of each
        subtask are short. Raises :class:`SpecError` if parameters were unfrozen that updates don't
        carry.
        """
        self._model.check_frozen()
        if self.optimizer is not None and self.spec.keeps_optimizer:
            return
        self.optimizer = self._new_optimizer()
        if self.member is not None:
            self.member.use(self.optimizer, keeps=self.spec.keeps_optimizer)
        self._exchange_gradients(self.optimizer)
        # The user's code may change the momentum itself, so it is tuned only on request.
        momenta = Momenta(self.optimizer) if self.spec.tuning.momentum else None
        correction = {"correction": momenta.correction} if momenta else {}
        factor = learning_rate_factor(self._divergences)
        self._rates = Rates(self.task, self.optimizer, factor=factor, **correction)
        self._momenta = momenta

    def _exchange_gradients(self, optimizer: Optimizer) -> None:
        if self._mean_gradients is not None:
            # A task can return the same optimizer again.
            self._mean_gradients.close()
            self._mean_gradients = None
        if self.layout.gradients:
            clips = partial(clip, self.task, optimizer, 0)
            others = self.task.clips_itself, moments_of(optimizer).uncorrected
            hooked = are_hooked(self._model.parameters) or step_hooks(optimizer)
            only_clips = not any((*others, hooked, self.findings.trains_alike))
            restart = 1 if only_clips else RESTART
            self._mean_gradients = MeanGradients(optimizer, self._model.parameters, clips, restart)
            self.task.loop_clips = self._mean_gradients.loop_clips

    def _new_optimizer(self) -> Optimizer:
        trained = [each for each in self._model.module.parameters() if each.requires_grad]
        with user_code("optimizer"):
            given = self.task.optimizer(trained)
        optimizer = as_optimizer(given)
        check_workers(optimizer, self.spec.workers.max)
        return optimizer

    def _follow_rollback(self, base: Base) -> None:
        """Keep nothing of the training that went back; make smaller steps if it diverged."""
        self.rollbacks = base.rollbacks
        self._divergences = base.rollbacks - base.restorations
        self._local = self.optimizer = None
        self.start_subtask()

    def interval_stop(self, subtask: int, position: int, share: float = 1.0) -> int:
        """Return the sample where a push interval ends that starts at ``position``.

        ``share`` in (0, 1] is the fraction of a full interval that this worker makes.
        """
        self._share = share
        size, batch = self.plan.size(subtask), int(self.task.batch_size)
        if self.member is not None:
            even = self.plan.ends(subtask, position, size) is None
            stop = self.member.interval_stop(position, size, even=even)
            return stop if self._crosses_batches else self.plan.whole_batches(subtask, stop)
        whole = self.spec.push_interval
        if whole == "subtask":
            whole = -(-size // batch)
        stop = min(size, position + local_steps(whole, share) * batch)
        return self.plan.whole_batches(subtask, stop)

    @property
    def _crosses_batches(self) -> bool:
        """True if steps may end within a sampler's own batches, so that rounds can be short."""
        return self.member is not None and self.member.crosses_batches

    @property
    def member(self) -> Member | None:
        """Part of this worker in the job's rounds; None if the rule has no rounds."""
        if self._rule.rounds and self._member is None:
            spec, batch = self.spec, self.findings.batch_size
            steps = spec.push_interval
            if steps == "subtask":
                steps = self.plan.size(0)  # More than there are, so that none is left over.
            fixed = spec.push_every is not None
            least, workers = self.findings.division.least, spec.workers.max
            if spec.batch == "worker":
                least = batch
            else:
                workers = min(workers, most_workers(batch, least))
            large = self.layout.floats > SMALL_FLOATS
            most = longest_interval(spec.ema.decay) if spec.ema else math.inf
            self._member = Member(
                *(batch, workers, steps),
                fixed=fixed,
                large=large,
                least=least,
                most_alone=most,
                gradients=self.layout.gradients,
                exact=bool(self.layout.doubles),
            )
        return self._member

    @property
    def max_unapplied(self) -> int:
        """Updates that may be unapplied while this worker trains."""
        if self.member is not None and self.member.takes_turns:
            # The last parts of a subtask don't wait for those that are under way.
            return MAX_UNAPPLIED + 1
        if self.member is None or self.member.overlaps or self.member.keeps_copy:
            return MAX_UNAPPLIED
        return 1

    @property
    def adopts_own_copy(self) -> bool:
        """True if the mean of a round with no other worker is this worker's copy."""
        exact = self.findings.codec in (Float32.name, ROWS) and not self.layout.doubles
        return exact and self._rule.rounds and not self.spec.tuning.mixing

    def shift(self, shifts: Iterable[tuple[ShardRange, Floats]]) -> None:
        """Move parts of the model, each by float32 [part.floats], between two local steps."""
        for part, floats in shifts:
            self._model.shift_part(floats, part.start)
        await_device(torch.device(self.device))

    def read_part(self, part: ShardRange, out: Floats) -> None:
        """Copy a part of the model into ``out``, float32 [part.floats]."""
        self._model.read_part(out, part.start)

    @property
    def is_loaded(self) -> bool:
        """True if the model is where the last interval has left it, but for shifts."""
        return self._model.loads == self._loads

    def train(
        self,
        base: Base,
        subtask: int,
        start: int,
        stop: int,
        *,
        after_step: Callable[[], bool] = lambda: False,
        asynchrony: float = 0.0,
        memory: Callable[[], Floats] | None = None,
        reads: bool = True,
    ) -> Trained:
        """Train samples ``[start, stop)`` of a subtask, or fewer if ``after_step()`` returns True.

        ``asynchrony`` in [0, 1) is the momentum that asynchrony adds, by which the optimizer's is
        lowered if the job tunes it. ``memory()`` is called at the end, and returns memory for the
        update, float32 [floats]. Unless it ``reads``, the update is empty. Raises
        :class:`NonFiniteLoss` and other :class:`~vcasgd.errors.UserCodeError`.
        """
        if base.rollbacks != self.rollbacks:
            self._follow_rollback(base)
        assert self.optimizer is not None
        momentum = self._momenta.follow(asynchrony) if self._momenta is not None else None
        self._source.announce(self.plan, subtask, start)
        start_from = interval_start(self._rule, self._local, base.floats)
        loads = not base.continues or not self.is_loaded
        if loads:
            self._load(base, start_from)
        elif self._mean_gradients is not None:
            self._mean_gradients.begin(base.version, None)
        self._loads = -1
        self._follow_applied(base, loads=loads)
        set_mode(self.optimizer, training=True)
        collected.take()  # What an evaluation, or an interval that failed, has logged.
        trained = self._train_interval(
            SampleRange(subtask, start, stop),
            (start_from, base.integers) if loads else None,
            asynchrony,
            after_step,
        )
        set_mode(self.optimizer, training=False)
        if reads:
            update = memory() if memory is not None else torch.empty(len(base.floats))
            integers = self._read_update(update, start_from)
        else:
            update, integers = torch.empty(0), self._model.read_integers()
        self._loads = self._model.loads
        if self._applied is not None:
            self._applied += trained.samples
        stop = start + trained.samples
        self._place = self._place_of(subtask, stop)
        return Trained(
            *(stop, trained.steps, trained.loss_sum, update, integers, momentum),
            skipped=trained.skipped,
            weight=trained.weight,
            logged=collected.take(),
        )

    def _train_interval(
        self,
        interval: SampleRange,
        loaded: tuple[Floats, Tensor] | None,  # noqa: ARG002 - for several processes
        asynchrony: float,  # noqa: ARG002
        after_step: Callable[[], bool],
    ) -> Interval:
        """Make the local steps of an interval. ``loaded``: vectors that it starts from, if new."""
        following = self._following(interval.subtask, interval.stop)
        return self._steps(interval, following, after_step)

    def _steps(
        self,
        interval: SampleRange,
        following: Iterator[SampleRange],
        after_step: Callable[[], bool],
    ) -> Interval:
        """Make the local steps of an interval: this process's part of them if it has ranks."""
        assert self.optimizer is not None
        assert self._rates is not None
        rates, plan, member, group = self._rates, self.plan, self.member, self._group
        subtask, start = interval.subtask, interval.start
        first = plan.sample_of(subtask, start) if self._applied is None else self._applied
        seed = seed_for(self.spec.seed, subtask, start)
        set_seed(seed + group.rank if group else seed, self.device)
        clip_factor = 1.0
        if member is not None:
            member.begin(plan.progress(subtask, start))
            # The noise of a smaller batch makes its gradient longer.
            clip_factor = member.share**-0.5
            if self.findings.division.sums:
                self.task.loss_factor = 1 / member.share
            if self._mean_gradients is not None:
                self._mean_gradients.captures = member.share < 1
        self._start_sequence(subtask, start)
        sizes = self._source.step_sizes(plan, interval)
        batches = self._source.batches(plan, interval, following)
        if group is not None:
            batches = group.batches(self._model.module, batches, sizes, self._precision)
        done = accumulate(sizes, initial=0)
        trained = train(
            self.task,
            self._model.module,
            self.optimizer,
            batches,
            self.device,
            after_step=after_step,
            before_step=lambda _: rates.follow(plan.place(first + next(done))),
            clip_factor=clip_factor,
            precision=self._precision,
            bad=self._bad,
            weights=self.findings.weights,
            mean_gradients=self._mean_gradients,
        )
        mean = self._mean_gradients
        if member is not None and mean is not None and (mean.gave_up or mean.keeps_own):
            member.uncorrectable = name_of(self.optimizer)
        if group is not None:
            group.average(self._model.statistics())
        return trained

    def _follow_applied(self, base: Base, *, loads: bool) -> None:
        """Note how much of the job comes before an interval, if its step is made again.

        Such steps need the same rate, so a schedule goes by what the base contains then, and not by
        the places of the workers' own samples. Workers that start together in each round don't.
        """
        if self._mean_gradients is None or self._mean_gradients.restart == 1:
            self._applied = None
        elif loads or self._applied is None:
            self._applied = base.round.samples

    def _load(self, base: Base, start_from: Floats) -> None:
        """Load a base, or what the last step leads to from there with its mean gradient."""
        mean, parameters = self._mean_gradients, None
        if mean is not None and base.rollbacks == self.rollbacks:
            parameters = mean.begin(base.version, base.floats[self.layout.state_floats :])
        self._model.load(start_from, base.integers)
        with torch.no_grad():
            for parameter, exact in zip(self._model.parameters, parameters or (), strict=False):
                parameter.copy_(exact)

    def _place_of(self, subtask: int, position: int) -> tuple[int, int]:
        """Return the epoch of a sample, and its number in the order of that epoch."""
        return self.plan.epoch_of(subtask), self.plan.bounds(subtask)[0] + position

    def _start_sequence(self, subtask: int, start: int) -> None:
        """Tell the task if the next batch doesn't follow the last one that was trained."""
        if self._place != self._place_of(subtask, start):
            with user_code("start_sequence"):
                self.task.start_sequence(self._model.module)
        self._place = None

    @cached_property
    def _source(self) -> BatchSource:
        spec, device, skips = self.spec, self.device, self.spec.skips_bad_samples
        return BatchSource(
            *(self.task, self.findings.data.dataset, device, spec.seed, self._step_size),
            crosses=lambda: self._crosses_batches,
            skips=skips,
        )

    @cached_property
    def _bad(self) -> BadSamples | None:
        """The bad samples of this worker; None if a bad sample is a failure."""
        skips = self.spec.skips_bad_samples
        return BadSamples(self.task, self.findings.data.dataset, self.device) if skips else None

    @property
    def bad_samples(self) -> dict[str, str]:
        """Index and reason of the newest samples that this worker skipped."""
        bad = self.__dict__.get("_bad")
        return {str(each.index): each.why for each in bad.found} if bad else {}

    def _step_size(self, samples: int) -> int:
        """Return the samples of each local step in an interval of so many samples."""
        member = self.member
        return member.batch_size(samples) if member else batch_size_of(self.task)

    def _following(self, subtask: int, start: int) -> Iterator[SampleRange]:
        """Yield the intervals that this worker probably trains from a sample of a subtask on."""
        while subtask < self.plan.total_subtasks:
            size = self.plan.size(subtask)
            while start < size:
                stop = self.interval_stop(subtask, start, self._share)
                yield SampleRange(subtask, start, stop)
                start = stop
            subtask, start = subtask + self._source.turn, 0

    def close(self) -> None:
        """End the loader processes; training again starts new ones."""
        if (source := self.__dict__.get("_source")) is not None:
            source.close()

    def reading(self) -> dict[str, float]:
        """Return the data set's counters of its reads; empty if it has none."""
        source = self.__dict__.get("_source")
        return source.reading() if source else {}

    def _read_update(self, update: Floats, start_from: Floats) -> Tensor:
        """Fill an update, float32 [floats], after an interval; return int64 [k]."""
        origin = start_from if self._rule.payload is Payload.DELTA else None
        integers = self._model.read_into(update, origin)
        if self._mean_gradients is not None:
            self._mean_gradients.read(update[self.layout.state_floats :])
        self._local = None
        # The parameter server would refuse it, and blame this worker.
        if not is_sound(update):
            raise NonFiniteLoss(
                "the model's parameters are no longer finite after a push interval",
                remedy="lower the learning rate or clip gradients",
            )
        if self._rule.pull < 1:
            # An elastic rule sends the worker's copy.
            self._local = update.clone()
        return integers

    @property
    def halves(self) -> bool:
        """True if workers fetch bfloat16 instead of float32."""
        return self.spec.update.codec == BFloat16.name

    def is_last(self, subtask: int, stop: int) -> bool:
        """Return True if an interval may be this worker's last one, because the job ends."""
        plan = self.plan
        ending = LAST_SUBTASKS * self.spec.workers.max
        return subtask >= plan.total_subtasks - ending and stop == plan.size(subtask)

    def evaluate(
        self,
        floats: Floats,
        integers: Tensor,
        *,
        average: Floats | None = None,
        after_step: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Return the means of the task's metrics for a snapshot; empty if it was stopped.

        ``average``, float32 [floats], is measured beside or instead of it, as the job says. Raises
        :class:`MachineDiffers` if the validation set has another length than the first worker's,
        besides what :func:`~vcasgd.learning.model_evaluation.evaluate` raises.
        """
        self.findings.check_validation()
        # What the model carries from batch to batch is the evaluation's.
        self._place = None
        vectors, ema = [floats], self.spec.ema
        if ema is not None and average is not None:
            vectors = [average] if ema.evaluate == "instead" else [floats, average]
        means = []
        for vector in vectors:
            self._model.load(vector, integers)
            means.append(means_of(self._evaluate_loaded((vector, integers), after_step)))
        return {} if not all(means) else with_average(*means)

    def _evaluate_loaded(
        self,
        vectors: tuple[Floats, Tensor],  # noqa: ARG002 - for several processes
        after_step: Callable[[], bool],
    ) -> list[Metrics]:
        """Evaluate the model that was loaded from vectors; return the results of all processes."""
        return [self._evaluate_part(EvaluationPart(), after_step)]

    def _evaluate_part(self, part: EvaluationPart, after_step: Callable[[], bool]) -> Metrics:
        found = self.findings.validation_set
        return evaluate_part(self.task, self._model.module, found, self.device, part, after_step)


def with_average(
    metrics: dict[str, float], average: dict[str, float] | None = None
) -> dict[str, float]:
    """Return the metrics of a model and those of its average, with other names."""
    beside = {EMA_PREFIX + name: value for name, value in (average or {}).items()}
    beside.pop(f"{EMA_PREFIX}count", None)
    return metrics | beside
