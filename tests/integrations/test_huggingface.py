"""A trainer of transformers as a task: the same steps, and refusals of what can't work."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import trained_on
from support.repeated import Machine, assert_not_repeated
from torch import nn
from torch.utils.data import SequentialSampler

from vcasgd.errors import SpecError
from vcasgd.learning.rates import Rates
from vcasgd.spec.job import JobSpec
from vcasgd.task.place import Place
from vcasgd.task.task import Task, load_task
from vcasgd.worker.learner import Learner

EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface"

pytestmark = pytest.mark.usefixtures("one_thread", "transformers")


def example(**args: Any) -> Task:
    return load_task("train:task", args, EXAMPLE)


def changed(change: Callable[[Any], object], **args: Any) -> Any:
    """Return the task of the example, whose trainer is changed before it is used."""
    made: Any = example(**args)

    def make_trainer() -> Any:
        trainer = made._make_trainer()
        change(trainer)
        return trainer

    return type(made)(make_trainer)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.ci
@pytest.mark.parametrize("steps", [1, 2])
def test_local_steps_are_those_of_the_trainer(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    # Given a trainer that takes the samples in order, with warm-up, decay, and clipped gradients
    def accumulates(trainer: Any) -> None:
        for each in (trainer.args, trainer.accelerator):
            each.gradient_accumulation_steps = steps

    task = changed(accumulates, epochs=1)
    trainer = task._make_trainer()
    trainer.args.max_steps, trainer.args.max_grad_norm = 8, 0.5
    trainer.args.dataloader_pin_memory = False
    monkeypatch.setattr(trainer, "_get_train_sampler", SequentialSampler)
    first = {
        name: each.clone() for name, each in without_dropout(trainer.model).state_dict().items()
    }
    trainer.train()

    # When the task makes as many steps from the same values
    task.trainer.args.max_steps, task.trainer.args.max_grad_norm = 8, 0.5
    task.clip_norm = 0.5
    model = without_dropout(task.model())
    model.load_state_dict(first)
    optimizer = task.optimizer([each for each in model.parameters() if each.requires_grad])
    rates = Rates(task, optimizer)
    trained_on(
        *(task, model, optimizer, 8 * 16 * steps),
        before_step=lambda done: rates.follow(
            Place(done / (8 * 16 * steps), step=done // (16 * steps), steps=8)
        ),
    )

    # Then the models are the same
    for name, each in trainer.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], each, rtol=1e-4, atol=1e-6, msg=name)
    assert not torch.equal(first["classifier.weight"], model.state_dict()["classifier.weight"])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("deepspeed", {"stage": 3}, "deepspeed: it shards a model"),
        ("fsdp", True, "fsdp: leave it out, and pass parallel="),
        ("torch_compile", True, "torch_compile: the trainer compiles the model only"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, value: object, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        changed(lambda trainer: setattr(trainer.args, name, value)).model()


def test_a_schedule_that_follows_metrics_is_refused() -> None:
    task: Any = example()
    task.trainer.args.lr_scheduler_type = "reduce_lr_on_plateau"
    with pytest.raises(SpecError, match="ReduceLROnPlateau: the learning rate must be a function"):
        task.optimizer(list(task.model().parameters()))


def test_a_training_step_of_its_own_is_refused() -> None:
    def own(trainer: Any) -> None:
        step = {"training_step": lambda *_: torch.zeros(1)}
        trainer.__class__ = type("Own", (type(trainer),), step)

    with pytest.raises(SpecError, match="a training_step of its own: the worker makes the steps"):
        changed(own).model()


def test_a_repetition_leaves_the_optimizer_of_a_trainer_alone() -> None:
    # Given a trainer that was given its optimizer, so that there is only one
    def given(trainer: Any) -> None:
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)

    assert_not_repeated(Machine(changed(given)))


def test_only_answers_of_trl_count() -> None:
    """A question has no labels, as TRL wants it."""
    pytest.importorskip("trl", reason="needs the extra trl")
    task = load_task("train:task", {}, EXAMPLE.with_name("sft"))
    dataset = task.dataset("train")
    batch = task.collate([dataset[0], dataset[1]])

    loss = task.loss(task.model(), batch)

    answer = batch["labels"][0][batch["labels"][0] != -100]
    assert 0 < len(answer) < int(batch["attention_mask"][0].sum())
    assert torch.isfinite(loss)


def test_batches_count_by_their_labels() -> None:
    # Given a trainer of a language model, whose loss is a mean over labels
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from vcasgd.integrations.huggingface import TrainerTask

    def make_trainer() -> Trainer:
        sizes = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        arguments = TrainingArguments("out", report_to="none", use_cpu=True)
        return Trainer(model=GPT2LMHeadModel(config), args=arguments)

    task = TrainerTask(make_trainer)
    model = without_dropout(task.model())
    words = torch.arange(24).view(3, 8) % 16
    labels = torch.full_like(words, -100)
    labels[0, 2], labels[2] = words[0, 2], words[2]
    parts = [
        {"input_ids": words[part], "labels": labels[part]}
        for part in (slice(0, 1), slice(1, 2), slice(2, 3))
    ]

    # Then the weighted mean of its parts is the loss of the whole batch
    weights = [float(task.batch_weight(part) or 0) for part in parts]
    assert weights == [1, 0, 8], "as the trainer counts them"
    whole = task.loss(model, {"input_ids": words, "labels": labels})
    mean = (task.loss(model, parts[0]) + 8 * task.loss(model, parts[2])) / 9
    assert float(mean.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)


def test_a_metric_that_a_subclass_adds_is_known_before_training_and_ranks_models() -> None:
    # Given a trainer whose evaluation adds the perplexity, as for language models
    def with_perplexity(self: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super(type(self), self).evaluate(*args, **kwargs)
        return metrics | {"eval_perplexity": math.exp(metrics["eval_loss"])}

    def adds(trainer: Any) -> None:
        trainer.__class__ = type("Own", (type(trainer),), {"evaluate": with_perplexity})

    spec = {"name": "lm", "task": "t:task", "epochs": 1, "stop": {"metric": "perplexity"}}
    learner = Learner(JobSpec.parse(spec), changed(adds), "cpu")
    before = [each.clone() for each in learner.initial()]

    # Then one batch shows its metrics, and changes nothing
    assert "perplexity" in learner._rehearse()
    learner.rehearse(lambda: None)
    assert all(map(torch.equal, learner.initial(), before))

    # And a metric that it lacks is an error before the first step
    spec["stop"] = {"metric": {"name": "bleu"}}
    with pytest.raises(SpecError, match=r"stop\.metric: evaluate returns .*perplexity"):
        Learner(JobSpec.parse(spec), changed(adds), "cpu").rehearse(lambda: None)


def test_early_stopping_without_patience_ends_after_the_first_evaluation() -> None:
    from transformers import EarlyStoppingCallback

    patience = EarlyStoppingCallback(early_stopping_patience=0)
    task = changed(lambda trainer: trainer.add_callback(patience), epochs=1)
    task.trainer.args.metric_for_best_model = "loss"

    assert task.end_after([]) is None
    assert "loss was not improved after 0.5" in (task.end_after([{"loss": 0.5}]) or "")
