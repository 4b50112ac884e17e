"""Shards of data that can only be iterated over: which a data set has, and reading one in an epoch.

Shards are those of Hugging Face's ``datasets`` (``num_shards`` and ``shard``), the files of a
``WebDataset``, or the parts that a data set reads according to
``torch.utils.data.get_worker_info``; otherwise all of it is one shard. Each shard of an epoch is
read under random numbers of its own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, Dataset

from vcasgd.errors import SpecError, UserCodeError, VcasgdError
from vcasgd.learning.draws import (
    random_state,
    restore_random_state,
    seed_for,
    seeded,
    set_epoch,
)
from vcasgd.task.task import user_traceback

log = logging.getLogger(__name__)

#: Most shards: data sets of more files have several in a shard.
MAX_SHARDS = 1024
#: Samples that are counted before the worker reports that it goes on.
COUNTED = 1000


class StreamShard:
    """Iterator over one shard in one epoch, with random numbers of its own."""

    def __init__(
        self,
        source: Any,
        shards: int,
        epoch: int,
        shard: int,
        seed: int,
        init: Callable[[int], None] | None,
    ) -> None:
        self.offset = 0
        own_seed = seed_for(seed, epoch, shard)
        with seeded(own_seed):
            self._random = random_state()
        self._info: Any = None
        if callable(getattr(source, "shard", None)):
            part = source.shard(num_shards=shards, index=shard)
        else:
            # Another iterator may still read another epoch.
            part = copy.copy(source)
            _seed_pipeline(part, epoch, own_seed)
            if shards > 1:
                self._info = _Share(shard, shards, own_seed, part)
        set_epoch(part, epoch)
        with self._reading():
            if init is not None and self._info is not None:
                init(shard)
            self._iterator = iter(part)

    def read(self, count: int) -> list[Any]:
        """Return the next samples, ``count`` unless the shard ends."""
        with self._reading():
            samples = list(islice(self._iterator, count))
        self.offset += len(samples)
        return samples

    def skip(self, count: int, on_progress: Callable[[], None] = lambda: None) -> int:
        """Drop the next samples; return how many, ``count`` unless the shard ends."""
        skipped = 0
        while skipped < count:
            wanted = min(COUNTED, count - skipped)
            with self._reading():
                dropped = sum(1 for _ in islice(self._iterator, wanted))
            skipped += dropped
            self.offset += dropped
            on_progress()
            if dropped < wanted:
                break
        return skipped

    @property
    def asked(self) -> bool:
        """True if the data set asked which part of it this process reads."""
        return self._info is not None and self._info.asked

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Use this shard's random numbers, and tell the data set which part of it is read."""
        outer, info = random_state(), torch_worker._worker_info
        restore_random_state(self._random)
        torch_worker._worker_info = self._info
        try:
            yield
        except VcasgdError:
            raise
        except Exception as error:
            raise UserCodeError(
                f"the iterable data set raised {type(error).__name__} after sample {self.offset} "
                f"of a shard: {error}",
                remedy="catch it in __iter__; an iterator ends with an exception, so a bad sample "
                "can't be skipped from outside",
                traceback=user_traceback(error),
            ) from error
        finally:
            self._random = random_state()
            restore_random_state(outer)
            torch_worker._worker_info = info


class _Share:
    """Result of ``get_worker_info`` while a shard is read; see torch's ``WorkerInfo``."""

    rng = None
    worker_method = "multiprocessing"

    def __init__(self, shard: int, shards: int, seed: int, dataset: Any) -> None:
        self._shard, self._shards, self._dataset = shard, shards, dataset
        self.seed = seed
        self.asked = False

    @property
    def dataset(self) -> Any:
        """The data set, of which a function can choose the part that is read."""
        self.asked = True
        return self._dataset

    @property
    def id(self) -> int:
        """Number of the shard."""
        self.asked = True
        return self._shard

    @property
    def num_workers(self) -> int:
        """Number of shards."""
        self.asked = True
        return self._shards


def is_stream(dataset: Any) -> bool:
    """Return True if the samples of a data set can only be iterated over.

    Some iterable ones, such as those of MosaicML streaming, have indices as well.
    """
    get = getattr(type(dataset), "__getitem__", None)
    has_indices = get not in (None, Dataset.__getitem__) and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and not has_indices


def count_shards(source: Any, readers: int, seed: int, init: Callable[[int], None] | None) -> int:
    """Return the number of shards of a data set, at least 1.

    ``readers`` is the number of loader processes among which the data set may divide itself.
    """
    known = _num_shards(source)
    if known is not None:
        return min(max(known, 1), MAX_SHARDS)
    parts = min(_files_of(source) or readers, MAX_SHARDS)
    if parts == 1:
        return 1
    first = StreamShard(source, parts, 0, 0, seed, init)
    first.read(1)
    if first.asked:
        return parts
    if readers > 1:
        log.warning(
            "the iterable data set doesn't look at get_worker_info, so all of it is one shard; "
            "each of %d loader processes would yield all of it",
            readers,
        )
    return 1


def known_lengths(source: Any, shards: int) -> tuple[int, ...] | None:
    """Return the number of samples in each shard, if the data set knows them."""
    lengths = getattr(source, "shard_lengths", None)
    if lengths is not None:
        return tuple(int(each) for each in lengths)
    if shards > 1:
        return None
    try:
        return (len(source),)
    except (TypeError, NotImplementedError):
        return None


def _num_shards(source: Any) -> int | None:
    known = getattr(source, "num_shards", getattr(source, "n_shards", None))
    return known if isinstance(known, int) and not isinstance(known, bool) else None


# -- webdataset ------------------------------------------------------------------------------------


def shuffles_files(source: Any) -> bool:
    """Return True if a ``WebDataset`` is shuffled, so that its files may have any order."""
    return any(_is_shuffle(stage) or hasattr(stage, "epoch") for stage in _stages(source))


def _stages(source: Any) -> list[Any]:
    stages = getattr(source, "pipeline", None)
    return stages if isinstance(stages, list) else []


def _is_shuffle(stage: Any) -> bool:
    """Return True for ``shuffle`` without a generator of the user's."""
    function, options = getattr(stage, "f", None), getattr(stage, "kw", None)
    named = getattr(function, "__name__", "") == "_shuffle"
    return named and isinstance(options, dict) and options.get("rng") is None


def _files_of(source: Any) -> int | None:
    """Return the number of files of a ``WebDataset`` whose epoch is one pass over them."""
    first, *_ = [*_stages(source), None]
    urls = getattr(first, "urls", None)
    # With ``resampled`` or ``with_epoch``, each loader process has an epoch of its own.
    whole = not hasattr(first, "epoch") and getattr(source, "repetitions", 1) == 1
    return len(urls) if isinstance(urls, list) and whole else None


def _seed_pipeline(part: Any, epoch: int, seed: int) -> None:
    """Give the stages of a copied ``WebDataset`` their epoch, or random numbers of their own.

    Otherwise they draw from the time, and count the passes of this process.
    """
    stages = [copy.copy(stage) for stage in _stages(part)]
    for stage in stages:
        if isinstance(stage, DataLoader):
            raise SpecError(
                "task: a WebLoader yields batches that workers can't divide",
                remedy="pass DataLoader(dataset, batch_size) over the data set",
                field="task",
            )
        if hasattr(stage, "epoch"):
            stage.epoch, stage.seed = epoch - 1, seed
            stage.deterministic = True
        elif _is_shuffle(stage):
            stage.kw = {**stage.kw, "seed": seed}
    if stages:
        part.pipeline = stages
