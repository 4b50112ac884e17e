"""Trainers of Hugging Face end as with their own loop on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from support.compat import (
    SEEDS,
    EpochBatches,
    Points,
    assert_close,
    ends_of,
    facts_of,
    grid,
    simulated,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from vcasgd.errors import SpecError
from vcasgd.fleet.histories import always
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.task.place import Place
from vcasgd.task.task import Task

EPOCHS, BATCH = 2, 64
pytestmark = pytest.mark.usefixtures("one_thread", "transformers")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Points().model()

    def forward(self, points: Any, labels: Any = None) -> dict[str, Any]:
        answers = self.layers(points)
        return {"loss": F.cross_entropy(answers, labels), "logits": answers}


def collated(samples: list[Any]) -> dict[str, Any]:
    if isinstance(samples[0], dict):
        return dict(default_collate(samples))
    points, labels = zip(*samples, strict=True)
    return {"points": torch.stack(points), "labels": torch.stack(labels)}


def streamed() -> Any:
    """Return a stream of Hugging Face with several shards."""
    from datasets import Dataset

    points, labels = (each.numpy() for each in Points().dataset("train").tensors)
    table = Dataset.from_dict({"points": list(points), "labels": labels}).with_format("torch")
    return table.to_iterable_dataset(num_shards=8)


class Drawn(EpochBatches):
    """The sampler of a job's order."""

    def __len__(self) -> int:
        return Points.samples

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(super().__iter__())


@cache
def made() -> Callable[..., Any]:
    """Return a function that makes a trainer whose callback and loss follow the step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Noise(TrainerCallback):
        """Noise that decreases with the step, until the middle of the second epoch."""

        noise = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.noise = 3 * max(0.0, 1 - state.global_step / 100) if state.epoch < 1.5 else 0.0

    class Noisy(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            if model.training:
                (noise,) = (each.noise for each in self.callbacks if isinstance(each, Noise))
                points = inputs["points"]
                # The same for each sample, whatever batch it is in.
                drawn = torch.sin(1e4 * points + self.state.global_step)
                inputs = {**inputs, "points": points + noise * drawn}
            return super().compute_loss(model, inputs, **more)

        @property
        def callbacks(self) -> Any:
            return self.callback_handler.callbacks

    def make(
        callbacks: Sequence[Any] = (),
        train_dataset: Any = None,
        own: type = object,
        **arguments: Any,
    ) -> Any:
        args = TrainingArguments(
            "out",
            **{
                "per_device_train_batch_size": BATCH,
                "per_device_eval_batch_size": 512,
                "num_train_epochs": EPOCHS,
                "learning_rate": 0.1,
                "optim": "sgd",
                "lr_scheduler_type": "cosine",
                "warmup_steps": 20,
                "max_grad_norm": 0.0,
                "report_to": "none",
                "use_cpu": True,
                "save_strategy": "no",
                "disable_tqdm": True,
                "remove_unused_columns": False,
                "dataloader_pin_memory": False,
                **arguments,
            },
        )
        points = Points()
        return (type("Own", (own, Noisy), {}) if own is not object else Noisy)(
            model=Network(),
            args=args,
            data_collator=collated,
            train_dataset=train_dataset or points.dataset("train"),
            eval_dataset=points.dataset("validation"),
            callbacks=[Noise(), *callbacks],
            compute_metrics=lambda found: {
                "accuracy": (found.predictions.argmax(1) == found.label_ids).mean()
            },
        )

    return make


def task_of(**arguments: Any) -> Callable[[], Task]:
    from vcasgd.integrations.huggingface import TrainerTask

    return lambda: TrainerTask(lambda: made()(**arguments))


@pytest.mark.ci
def test_callbacks_that_each_worker_runs_are_noted() -> None:
    notes = facts_of(task_of()()).notes

    assert "each worker runs Noise for its own batches" in notes["hooks-on-workers"]


def test_a_callback_may_set_rates() -> None:
    from transformers import TrainerCallback

    class Stretch(TrainerCallback):
        """Half of the scheduled rate in the first epoch."""

        def on_step_begin(
            self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
        ) -> None:
            optimizer.param_groups[0]["lr"] *= 0.5 if state.epoch < 1 else 1.0

    tasks = [task_of(callbacks=each)() for each in ([], [Stretch()])]
    rates = []
    for task in tasks:
        task.optimizer(task.model().parameters())
        places = (Place(0.0, step, epoch=step // 64, batch=step % 64, epoch_steps=64)
                  for step in (30, 31, 70))  # fmt: skip
        rates.append([task.step_options(place)[0]["lr"] for place in places])

    assert rates[1] == [0.5 * rates[0][0], 0.5 * rates[0][1], rates[0][2]]


def test_a_loader_of_other_data_for_the_evaluation_is_refused() -> None:
    class Own:
        def get_eval_dataloader(self, *_: Any) -> Any:
            raise AssertionError("the job evaluates eval_dataset")

    with pytest.raises(SpecError, match="get_eval_dataloader of its own"):
        task_of(own=Own)().model()


def test_an_evaluation_leaves_the_type_of_the_model_alone() -> None:
    task: Any = task_of(bf16_full_eval=True)()
    model, data = task.model(), task.dataset("validation")

    task.evaluate_set(model, [task.collate([data[0], data[1]])])

    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_an_optimizer_is_made_as_by_the_trainer() -> None:
    class Own:
        """Methods as the library calls them: it uses the attributes that they set."""

        model: Any

        def create_optimizer(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

        def create_scheduler(self, num_training_steps: int) -> None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: 1 - step / num_training_steps
            )

    task: Any = task_of(own=Own)()
    optimizer = task.optimizer(task.model().parameters())

    middle = Place(0.5, 64, epoch=1, batch=0, epoch_steps=64)
    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    assert task.step_options(middle)[0]["lr"] == 0.25
    assert task.trainer.optimizer is optimizer


@grid
@pytest.mark.ci
def test_parameters_of_the_trainer_are_trained(workers: int) -> None:
    class Scaled:
        """A temperature, which is too high at first."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.scale = nn.Parameter(torch.tensor(-3.0))

        def create_optimizer(self) -> Any:
            optimizer = super().create_optimizer()
            optimizer.add_param_group({"params": [self.scale], "lr": 0.1})
            return optimizer

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            answers = model(inputs["points"], inputs["labels"])["logits"]
            loss = F.cross_entropy(answers * self.scale.exp(), inputs["labels"])
            return (loss, {"loss": loss, "logits": answers}) if return_outputs else loss

    assert_as_trainer(workers, own=Scaled)


def by_trainer(seed: int, **arguments: Any) -> dict[str, float]:
    torch.manual_seed(seed)
    trainer = made()(**arguments)
    trainer._get_train_sampler = lambda *_: Drawn(EPOCHS, seed)
    trainer.train()
    found: dict[str, float] = trainer.evaluate()
    return found


def assert_as_trainer(workers: int, **arguments: Any) -> None:
    """Fail if jobs end worse than a trainer with its own loop."""
    plain = [by_trainer(seed, **arguments)["eval_loss"] for seed in SEEDS]

    assert_close(ends_of(task_of(**arguments), workers, epochs=EPOCHS), plain)


@grid
@pytest.mark.ci
def test_a_trainer_ends_as_with_its_own_loop(workers: int) -> None:
    plain = [by_trainer(seed) for seed in SEEDS]

    ends = [simulated(task_of(), workers, seed, epochs=EPOCHS) for seed in SEEDS]

    assert_close([each["loss"] for each in ends], [each["eval_loss"] for each in plain])
    accuracies = [each["eval_accuracy"] for each in plain]
    assert_close([each["accuracy"] for each in ends], accuracies, "accuracy")


@grid
@pytest.mark.extended
def test_a_callback_changes_the_gradient_of_the_whole_batch(workers: int) -> None:
    from transformers import TrainerCallback

    class Clamps(TrainerCallback):
        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            for each in model.parameters():
                each.grad.clamp_(-0.003, 0.003)

    assert_as_trainer(workers, callbacks=[Clamps()])


@pytest.mark.extended
@grid
def test_a_trainer_streams_its_data(workers: int) -> None:
    # Given a stream, whose length the trainer has to be told
    steps = EPOCHS * Points.samples // BATCH

    # Then a job counts its samples itself
    assert_as_trainer(workers, train_dataset=streamed(), max_steps=steps)


def test_a_callback_can_stop_the_training() -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    spec = JobSpec.parse({"name": "case", "task": "case:Case", "epochs": EPOCHS})
    outcome = Simulation(spec, task_of(callbacks=[Stop()]), Conditions(always(2))).run()

    assert "a callback stopped the training" in (outcome.ended or "")
    assert [point.epoch for point in outcome.points] == [1]


def test_the_evaluations_of_the_job_drive_early_stopping() -> None:
    from transformers import EarlyStoppingCallback

    task: Any = task_of(callbacks=[EarlyStoppingCallback(2)], metric_for_best_model="accuracy")()
    accuracies = [{"accuracy": value} for value in (0.3, 0.5, 0.4, 0.45)]

    assert task.end_after(accuracies[:3]) is None
    assert "accuracy was not improved after 0.5" in (task.end_after(accuracies) or "")
