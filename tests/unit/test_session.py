"""Session in a script that runs on its own: ordinary training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

import vcasgd
from vcasgd.errors import NonFiniteLoss, UserCodeError

DATA = TensorDataset(torch.arange(10.0).view(10, 1))


class Lines(IterableDataset[tuple[Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter(DATA)


def line(weight: float = 0.0) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def session_of(model: nn.Module, **given: object) -> vcasgd.Session:
    return vcasgd.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def run_loop(
    session: vcasgd.Session, model: nn.Module, *args: object, **given: object
) -> list[Tensor]:
    """Run the loop with its steps, and return its batches."""
    collected = []
    for (batch,) in session.batches(*args, **given):
        collected.append(batch)
        session.step(model(batch).mean())
    return collected


def batches_of(*args: object, **given: object) -> list[Tensor]:
    model = line()
    return run_loop(session_of(model), model, *args, **given)


def test_each_epoch_has_every_sample_once_in_a_different_order() -> None:
    batches = batches_of(DATA, 4, epochs=2)

    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    first, second = (torch.cat(batches[cut : cut + 3]).flatten() for cut in (0, 3))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(10))
    assert first.tolist() != second.tolist()


def test_order_follows_the_seed_of_torch() -> None:
    orders = []
    for _ in range(2):
        torch.manual_seed(5)
        orders.append(torch.cat(batches_of(DATA, 4)))

    assert torch.equal(*orders)


def test_step_is_that_of_the_optimizer() -> None:
    # Given two equal models, one of them in a plain loop
    ours, theirs = line(1.0), line(1.0)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)

    for batch in run_loop(session_of(ours), ours, DATA, 4):
        loss = theirs(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert torch.equal(ours.weight, theirs.weight)
    assert ours.weight.grad is None


def test_loader_keeps_batch_size_and_collate_function() -> None:
    loader = DataLoader(DATA, batch_size=5, shuffle=True, collate_fn=lambda _: [torch.ones(3, 1)])

    assert [len(batch) for batch in batches_of(loader)] == [3, 3]


@pytest.mark.parametrize(
    ("loader", "epoch"),
    [
        (DataLoader(DATA, batch_size=4), [range(4), range(4, 8), range(8, 10)]),
        # A single last sample joins the batch before it.
        (DataLoader(DATA, batch_size=3, sampler=[5, 5, 1, 7]), [[5, 5, 1, 7]]),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2], [9, 8, 7]]), [[0, 1], [2], [9, 8, 7]]),
        (DataLoader(DATA, batch_sampler=BatchSampler([3, 2, 1], 2, False)), [[3, 2, 1]]),
        (DataLoader(Lines(), batch_size=4), [range(4), range(4, 8), range(8, 10)]),
    ],
    ids=["unshuffled", "sampler", "batch sampler", "torch's batches", "iterable"],
)
def test_a_loader_keeps_its_order(loader: DataLoader[object], epoch: list[list[int]]) -> None:
    batches = batches_of(loader, epochs=2)

    assert [batch.flatten().tolist() for batch in batches] == [list(each) for each in epoch] * 2


def test_a_loop_knows_where_a_sequence_starts() -> None:
    model = line()
    session, starts = session_of(model), []

    for (batch,) in session.batches(DataLoader(DATA, batch_size=4), epochs=2):
        starts.append(session.starts_sequence)
        session.step(model(batch).mean())

    assert starts == [True, False, False] * 2


@pytest.mark.parametrize("data", [DATA, Lines()], ids=["indexed", "iterable"])
def test_model_is_evaluated_after_each_epoch(
    data: Dataset[tuple[Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    model = line(2.0)
    session = session_of(model, schedule=lambda _: 0.0)

    @session.evaluation(data, batch_size=3)
    def evaluate(evaluated: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        assert evaluated is model
        assert not evaluated.training
        return {"mean": evaluated(batch[0]).sum(), "count": torch.tensor(len(batch[0]))}

    run_loop(session, model, DATA, 4, epochs=2)

    assert capsys.readouterr().out == "epoch 1: mean 9.0000\nepoch 2: mean 9.0000\n"
    assert session.metrics == {"mean": 9.0, "count": 10.0}
    assert model.training


def test_a_loader_of_the_evaluation_combines_its_samples() -> None:
    model = line(2.0)
    session = session_of(model)
    sizes = []

    def collate(samples: list[tuple[Tensor]]) -> Tensor:
        return torch.stack([sample for (sample,) in samples])

    @session.evaluation(DataLoader(DATA, batch_size=4, collate_fn=collate))
    def evaluate(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        sizes.append(len(batch))
        return {"mean": model(batch).sum(), "count": torch.tensor(len(batch))}

    run_loop(session, model, DATA, 5)

    assert sizes == [4, 4, 2]
    assert session.metrics["count"] == 10


def test_schedule_receives_the_progress_over_all_epochs() -> None:
    model = line()
    progress_values: list[float] = []
    session = session_of(model, schedule=lambda progress: progress_values.append(progress) or 1.0)

    run_loop(session, model, DATA, 5, epochs=2)

    assert progress_values == [0.0, 0.25, 0.5, 0.75]


def test_batch_without_a_step_is_refused() -> None:
    session = session_of(line())

    with pytest.raises(UserCodeError, match=r"ended without session\.step \(call it once for each"):
        list(session.batches(DATA, 4))


def test_step_without_a_batch_is_refused() -> None:
    with pytest.raises(UserCodeError, match="twice for one batch, or without a batch"):
        session_of(line()).step(torch.tensor(0.0))


def test_non_finite_loss_changes_no_parameter() -> None:
    model = line(1.0)
    session = session_of(model)
    next(session.batches(DATA, 4))

    with pytest.raises(NonFiniteLoss):
        session.step(model(torch.ones(1, 1)).mean() * float("nan"))
    assert model.weight.item() == 1.0


def patched() -> tuple[object, ...]:
    """Return what a loop with its own steps replaces in torch."""
    scaler = torch.amp.GradScaler
    return torch.autograd.backward, scaler.scale, scaler.step


@pytest.mark.parametrize("how", ["end", "break", "error"])
def test_torch_is_as_before_after_a_loop_with_its_own_steps(how: str) -> None:
    # Given a loop inside of another one
    before, model = patched(), line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = vcasgd.Session(model, optimizer).loader(DATA, batch_size=5)
    other = session_of(line()).loader(DATA)

    def loop() -> None:
        for (batch,) in watched:
            for _ in other:
                break
            assert patched() != before, "the loop is still watched"
            model(batch).mean().backward()
            optimizer.step()
            if how == "break":
                return
            if how == "error":
                raise ValueError("of the user")

    # When it ends
    if how == "error":
        with pytest.raises(ValueError, match="of the user"):
            loop()
    else:
        loop()

    # Then torch and the optimizer are as before
    assert patched() == before
    optimizer.step()


def test_gradients_of_a_stream_are_accumulated() -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = vcasgd.Session(model, optimizer).loader(
        DataLoader(Lines(), batch_size=2), gradient_accumulation_steps=2
    )
    ends = []
    for (batch,) in loader:
        (model(batch).mean() / 2).backward()
        if loader.ends_step:
            optimizer.step()
            optimizer.zero_grad()
        ends.append(loader.ends_step)

    # Also the last batch, although the others of its step are missing
    assert ends == [False, True, False, True, True]


def test_a_loop_can_have_a_new_loader_in_each_epoch() -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = vcasgd.Session(model, optimizer)

    for _ in range(2):
        for (batch,) in session.loader(DATA, batch_size=5):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()

    # Four steps of two epochs, in each of which the mean of the data is the mean gradient
    assert float(model.weight.detach()) == pytest.approx(-0.1 * 4 * 4.5)
