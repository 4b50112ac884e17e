"""A task's training set: samples with numbers, and their order in each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset

from vcasgd.errors import SpecError
from vcasgd.learning.draws import Draws, order_of
from vcasgd.learning.length import plan_for, total_samples
from vcasgd.learning.loader_processes import workers_of
from vcasgd.learning.stream_shards import is_stream
from vcasgd.learning.streams import Stream
from vcasgd.learning.subtasks import SampleBlocks, SampleOrder
from vcasgd.learning.training import batch_size_of
from vcasgd.spec.job import JobSpec
from vcasgd.task.place import Place
from vcasgd.task.task import Task, user_code

#: Shards whose samples are mixed in data sets of MosaicML streaming.
STREAMING_WINDOW = 4


@dataclass(frozen=True)
class TrainingSet:
    """The data set with indices, and its order, which is None for a seeded permutation."""

    dataset: Dataset[Any]
    order: SampleOrder | None

    @classmethod
    def of(cls, task: Task, seed: int, most: int | None = None) -> TrainingSet:
        """Return the training set of a task; a batch sampler also determines its batch size.

        A stream is counted, up to ``most``, when its number of samples is first needed. Raises
        errors of the user's code, and :class:`SpecError` for data whose samples have no numbers.
        """
        dataset = dataset_of(task, "train", seed, most)
        if isinstance(dataset, Stream):
            return cls(dataset, dataset)
        length_of(dataset, "train")
        with user_code("sampler"):
            order = order_of(task.sampler(dataset), dataset, seed)
        if isinstance(order, Draws) and order.batch_size is not None:
            task.batch_size = order.batch_size * task.batches_per_step
        return cls(dataset, order)

    @classmethod
    def of_job(cls, task: Task, spec: JobSpec, batch_size: int) -> TrainingSet:
        """Return that of a job, whose step is a batch of ``batch_size``: one for each task.

        Raises as :meth:`of`.
        """
        known: dict[str, Any] = vars(task)
        if "_training_set" not in known:
            # A job may end before the stream does.
            most = total_samples(spec, 0, batch_size) or None
            known["_training_set"] = cls.of(task, spec.seed, most)
        found: TrainingSet = known["_training_set"]
        return found

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return self.order.samples if self.order is not None else length_of(self.dataset, "train")

    @property
    def blocks(self) -> SampleBlocks | None:
        """Blocks of the data set that the permutation follows, if it has any."""
        blocks = getattr(self.dataset, "blocks", None)
        if isinstance(blocks, SampleBlocks):
            return blocks
        sizes = _streaming_shards(self.dataset)
        return SampleBlocks(sizes, STREAMING_WINDOW) if sizes else None


def dataset_of(task: Task, split: str, seed: int, most: int | None = None) -> Dataset[Any]:
    """Return the data set of a split; one that can only be iterated over as a :class:`Stream`, of
    which at most ``most`` samples are counted.

    Raises errors of the user's code.
    """
    with user_code(f"dataset({split!r})"):
        dataset: Any = task.dataset(split)
    if isinstance(dataset, DataLoader):
        raise SpecError(
            f"task: dataset({split!r}) returns a DataLoader",
            remedy="return its data set; batch_size, sampler, and collate of the task do the rest",
            field="task",
        )
    if isinstance(dataset, Iterator) and not isinstance(dataset, Dataset):
        raise SpecError(
            f"task: the data set of {split!r} is an iterator, which can be read once",
            remedy="pass a data set, whose __iter__ returns a new one each time",
            field="task",
        )
    if not is_stream(dataset):
        _streaming_shards(dataset)
        return cast("Dataset[Any]", dataset)
    if split != "train":
        return Stream(dataset, seed=seed)
    return Stream(
        dataset,
        seed=seed,
        readers=workers_of(task),
        chunk=batch_size_of(task),
        init=task.worker_init_fn,
        most=most,
    )


def _streaming_shards(dataset: Any) -> tuple[int, ...]:
    """Return the samples in each shard of a data set of MosaicML streaming; empty for others.

    Raises :class:`SpecError` if an epoch isn't one pass over them.
    """
    sizes = getattr(dataset, "samples_per_shard", None)
    if sizes is None:
        return ()
    found = tuple(int(each) for each in sizes)
    if sum(found) != len(dataset):
        raise SpecError(
            f"task: the data set has {sum(found)} samples, and {len(dataset)} in an epoch",
            remedy="leave out epoch_size, and proportion, repeat, and choose of its streams; a "
            "weighted sampler draws some samples more often",
            field="task",
        )
    return found


def first_place(task: Task, spec: JobSpec, batch_size: int) -> Place:
    """Return the first place of a job, which has its length. Raises as :meth:`TrainingSet.of`."""
    samples = TrainingSet.of_job(task, spec, batch_size).samples
    return plan_for(spec, samples, batch_size).place(0)


def length_of(dataset: Dataset[Any], split: str) -> int:
    """Return the number of samples in a data set. Raises :class:`SpecError` if it has none."""
    try:
        return len(dataset)  # type: ignore[arg-type]  # those with indices have a length
    except TypeError as error:
        raise SpecError(
            f"task: dataset({split!r}) has no length",
            remedy="return a data set with __len__ and __getitem__, or with __iter__",
            field="task",
        ) from error


# -- loaders of scripts ------------------------------------------------------------------------


@dataclass(frozen=True)
class LoaderData:
    """Data of a loader: ``sampler`` yields indices, or batches of them; None for data that has no
    indices. ``batch_size`` is the mean number of samples in a batch."""

    dataset: Dataset[Any]
    batch_size: int
    collate: Callable[[list[Any]], Any]
    sampler: Any


def data_of(loader: DataLoader[Any], batch_size: int | None = None) -> LoaderData:
    """Return what a loader loads, in batches of ``batch_size`` if that isn't None.

    Raises :class:`SpecError` if it can't be numbered, or has no batches of one size.
    """
    dataset, collate, batches = loader.dataset, loader.collate_fn, loader.batch_sampler
    streams = is_stream(dataset)
    if not streams:
        check_indexed(dataset)
    if type(batches) is BatchSampler:
        size, sampler = batch_size or batches.batch_size, None if streams else batches.sampler
        return LoaderData(dataset, size, collate, sampler)
    if batch_size is not None:
        raise SpecError(
            f"task: batch_size is {batch_size}, but the batches of the loader have sizes of their "
            "own",
            remedy="leave batch_size out",
            field="task",
        )
    if batches is None:
        # Each index, or each sample of a stream, is a batch.
        return LoaderData(dataset, 1, OwnBatches(collate), None if streams else loader.sampler)
    mean = Draws(batches, dataset, seed=0).batch_size
    if mean is None:
        raise SpecError(
            f"task: the batch sampler {type(batches).__name__} yields no lists of indices",
            remedy="pass it as sampler of the DataLoader if it yields single indices",
            field="task",
        )
    return LoaderData(dataset, mean, collate, batches)


def evaluation_data_of(loader: DataLoader[Any]) -> LoaderData:
    """Return what a loader of an evaluation loads: always the same samples if a sampler draws them.

    Raises as :func:`data_of`.
    """
    given = data_of(loader)
    if given.sampler is None:
        return given
    order = order_of(given.sampler, given.dataset, seed=0)
    if not isinstance(order, Draws):
        return given
    drawn = order.indices(0, 0, order.samples).tolist()
    return replace(given, dataset=Subset(given.dataset, drawn))


def check_indexed(dataset: Any) -> None:
    """Raise :class:`SpecError` if a data set's samples have no numbers."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise SpecError(
            f"task: the samples of a {type(dataset).__name__} have no numbers",
            remedy="pass a data set with __len__ and __getitem__, or with __iter__",
            field="task",
        )


@dataclass(frozen=True)
class OwnBatches:
    """Collate function of a data set whose samples are batches, each a list of one."""

    convert: Callable[[Any], Any]

    def __call__(self, samples: list[Any]) -> Any:
        return self.convert(samples[0])
