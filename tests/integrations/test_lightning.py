"""A module of Lightning as a task: the same steps, and refusals of what can't work."""

from __future__ import annotations

import warnings
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.batches import trained_on
from torch import nn
from torch.utils.data import DataLoader

from vcasgd.errors import SpecError
from vcasgd.learning.rates import Rates
from vcasgd.spec.job import JobSpec
from vcasgd.task.place import Place
from vcasgd.task.task import Task, load_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning"

pytestmark = pytest.mark.usefixtures("one_thread", "lightning")


def example(**args: Any) -> Task:
    return load_task("train:task", args, EXAMPLE)


def task_of(module: type[Any], **options: Any) -> Task:
    """Return a task with another module on the example's data."""
    task: Any = example()
    return type(task)(module, task._data, **options)


@pytest.fixture
def one_weight(lightning: ModuleType) -> Any:
    """Return a class of modules with one weight."""

    class OneWeight(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return OneWeight


@pytest.mark.parametrize("steps", [1, 2])
def test_local_steps_are_those_of_lightning(
    lightning: ModuleType, tmp_path: Path, steps: int
) -> None:
    # Given a module that Lightning trains on the samples in order, with clipped gradients
    made: Any = example()
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": steps}
    task = type(made)(made._make, made._data, **options)
    with closing(task):
        model = task.model()
        first = {name: each.clone() for name, each in model.state_dict().items()}
        other = made._make()
        other.load_state_dict(first)
        samples = torch.utils.data.Subset(task.dataset("train"), range(128))
        loader = DataLoader(samples, batch_size=task.batch_size // steps)
        with warnings.catch_warnings():
            # Lightning advises loader processes, and srun where it is installed.
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                max_epochs=1,
                accelerator="cpu",
                default_root_dir=tmp_path,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
                **options,
            )
            trainer.fit(other, loader, loader)

        # When the task makes the same steps
        optimizer = task.optimizer(list(model.parameters()))
        rates = Rates(task, optimizer)
        trained_on(
            *(task, model, optimizer, 128),
            before_step=lambda done: rates.follow(Place(done / 1280)),
        )

        # Then the modules are the same
        for name, each in other.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], each, msg=name)
        assert not torch.equal(first["model.1.weight"], model.state_dict()["model.1.weight"])


def test_arguments_of_the_trainer_that_the_job_sets_are_refused(one_weight: Any) -> None:
    with pytest.raises(SpecError, match=r"with max_time of the Trainer: .*takes callbacks"):
        task_of(one_weight, max_time="00:01:00:00")


def test_devices_and_strategy_agree_with_the_job(one_weight: Any) -> None:
    several = JobSpec.parse({"name": "module", "task": "m:t", "epochs": 1, "workers": {"gpus": 2}})
    task_of(one_weight, devices=2, strategy="ddp").follow_job(several)
    task_of(one_weight, devices="auto").follow_job(several)
    with pytest.raises(SpecError, match=r"devices=-1: .*workers.gpus: 2. Set it to all"):
        task_of(one_weight, devices=-1)().follow_job(several)
    with pytest.raises(SpecError, match=r"the strategy fsdp: each process has the whole model"):
        task_of(one_weight, strategy="fsdp")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("WeightAveraging", {}, "WeightAveraging can't be used: it averages .*set ema"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1}, "StochasticWeightAveraging can't be used"),
        ("GradientAccumulationScheduler", {"scheduling": {2: 4}}, "use accumulate_grad_batches"),
        ("Timer", {"duration": "00:00:10:00"}, "set stop.max_duration"),
    ],
)
def test_callbacks_that_follow_one_worker_are_refused_by_name(
    lightning: ModuleType, one_weight: Any, name: str, arguments: Any, message: str
) -> None:
    callback = getattr(lightning.callbacks, name)(**arguments)
    with pytest.raises(SpecError, match=message):
        task_of(one_weight, callbacks=callback).model()


def test_a_scheduler_that_follows_a_metric_is_refused(one_weight: Any) -> None:
    class Scheduled(one_weight):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "monitor": "val_loss"}]

    with pytest.raises(SpecError, match="ReduceLROnPlateau"):
        task_of(Scheduled).model()
