"""Notes of what a job of several workers does otherwise than one process, found at its start."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import SGD, Optimizer

from vcasgd.learning import second_moments
from vcasgd.learning.layout import Layout
from vcasgd.learning.local_moments import steps_as
from vcasgd.learning.mean_gradients import MAX_FLOATS
from vcasgd.learning.optimizers import name_of, parts_of
from vcasgd.spec.job import JobSpec
from vcasgd.task.task import Task

#: Remedy that is always left.
ALONE = "with workers.max 1, the job trains as one process"


def approximations(
    spec: JobSpec,
    task: Task,
    layout: Layout,
    optimizer: Optimizer,
    undivided: Sequence[str],
    *,
    mixes: bool = False,
) -> dict[str, str]:
    """Return what is approximated, each with its remedy, by the kinds of the events that say so.

    ``undivided`` are buffers that depend on whole batches although workers share them. ``mixes``:
    workers share the steps, and a sampler has batches of its own.
    """
    if spec.workers.max == 1:
        return {}
    found = {}
    if undivided:
        found["buffers-averaged"] = (
            f"{', '.join(undivided)}: whole batches change these buffers as parts of them don't, "
            f"and each version has the mean of the workers' values; {ALONE}"
        )
    if mixes:
        found["batches-mixed"] = (
            "the sampler has batches of its own, and a step of several workers has a part of one "
            "batch of each; set batch: worker, so that each worker trains whole batches, or "
            "min_local_batch to their size, so that one worker trains"
        )
    if task.clip_norm is not None and not layout.gradients:
        found["clip-approximated"] = (
            "clip_norm clips the gradient of a worker's part of a batch, at a norm that is larger "
            "by the root of the number of parts; the gradient of the whole batch is clipped with "
            f"the default rule and encoding in a model of at most {MAX_FLOATS:,} numbers whose "
            f"rounds have one step, and {ALONE}"
        )
    if task.clips_itself:
        found["loop-clips"] = (
            "the loop clips the gradient of a worker's part of a batch, at a norm that is larger "
            "by the root of the number of parts; give clip_norm to the Session or the task "
            "instead, which in small models clips the gradient of the whole batch"
        )
    if spec.keeps_optimizer and not second_moments.count(optimizer) and _has_state(optimizer):
        found["state-starts-again"] = (
            f"a worker that joins later starts with an empty state of {name_of(optimizer)}, as "
            "after a restart; Adam and AdamW of torch.optim take over the second moments of "
            "other workers"
        )
    if task.hooks:
        found["hooks-on-workers"] = (
            f"each worker runs {', '.join(task.hooks)} for its own batches: what they keep is the "
            "worker's own, and starts again with a new worker; keep tensors in the model, whose "
            "buffers travel"
        )
    return found


def _has_state(optimizer: Optimizer) -> bool:
    """Return False for SGD without momentum."""
    return not all(
        steps_as(part, SGD) and not any(group["momentum"] for group in part.param_groups)
        for part in parts_of(optimizer)
    )
