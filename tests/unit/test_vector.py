"""Conversion of a module's state to flat vectors, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vcasgd.errors import CheckpointDamaged, InvalidUpdate, SpecError
from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.learning.vector import gather, named_tensors, scatter


class Net(nn.Module):
    """Every kind of state: a tied parameter, a frozen one, a scalar, statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.encoder = nn.Linear(3, 2, bias=False)
        self.decoder = nn.Linear(3, 2, bias=False)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.zeros(99), persistent=False)


def vectors(layout: Layout) -> tuple[Tensor, Tensor]:
    return torch.zeros(layout.floats), torch.zeros(layout.integers, dtype=torch.int64)


def state_of(module: nn.Module) -> tuple[Tensor, Tensor]:
    floats, integers = vectors(Layout.of(module))
    gather(module, Layout.of(module), floats, integers)
    return floats, integers


def test_parameters_come_first_then_statistics_and_integers_are_separate() -> None:
    assert Layout.of(Net()).entries == (
        TensorEntry("scale", (), TensorKind.PARAMETER, 0),
        TensorEntry("norm.weight", (3,), TensorKind.PARAMETER, 1),
        TensorEntry("norm.bias", (3,), TensorKind.PARAMETER, 4),
        TensorEntry("encoder.weight", (2, 3), TensorKind.PARAMETER, 7),
        TensorEntry("norm.running_mean", (3,), TensorKind.STATISTIC, 13),
        TensorEntry("norm.running_var", (3,), TensorKind.STATISTIC, 16),
        TensorEntry("frozen", (2,), TensorKind.FROZEN, 19),
        TensorEntry("mask", (2,), TensorKind.INTEGER, 0),
        TensorEntry("norm.num_batches_tracked", (), TensorKind.INTEGER, 2),
    )


def test_counts() -> None:
    layout = Layout.of(Net())

    assert (layout.parameters, layout.sent, layout.floats, layout.integers) == (13, 19, 21, 3)


def test_statistics_follow_all_parameters_in_any_module_tree() -> None:
    layout = Layout.of(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))

    kinds = [entry.kind for entry in layout.entries]
    assert kinds == [*[TensorKind.PARAMETER] * 4, *[TensorKind.STATISTIC] * 2, TensorKind.INTEGER]


def test_scatter_is_the_inverse_of_gather() -> None:
    source, target = Net(), Net()
    source.norm(torch.randn(8, 3))
    floats, integers = state_of(source)

    scatter(floats, integers, target, Layout.of(target))

    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name


def test_tied_tensors_stay_tied() -> None:
    net = Net()
    floats, integers = state_of(net)

    scatter(torch.full_like(floats, 5.0), integers, net, Layout.of(net))

    assert net.decoder.weight is net.encoder.weight
    assert net.decoder.weight.eq(5).all()


def test_a_gathered_vector_does_not_share_memory_with_the_module() -> None:
    net = Net()
    floats, _ = state_of(net)
    before = floats.clone()

    with torch.no_grad():
        net.scale.fill_(100.0)

    assert torch.equal(floats, before)


def test_scatter_does_not_affect_autograd_or_the_optimizer() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    floats, integers = state_of(net)

    scatter(torch.zeros_like(floats), integers, net, Layout.of(net))
    net(torch.tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()

    assert net.weight.requires_grad
    assert net.weight.tolist() == [[-1.0, -2.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floating_point_types_are_gathered_as_float32(dtype: torch.dtype) -> None:
    net = nn.Linear(2, 2).to(dtype)
    floats, integers = state_of(net)
    expected = net.weight.detach().to(torch.float32)

    scatter(floats, integers, net, Layout.of(net))

    assert floats.dtype is torch.float32
    assert torch.equal(floats[:4].view(2, 2), expected)
    assert net.weight.dtype is dtype


def test_an_integer_parameter_is_with_the_integers() -> None:
    net = nn.Module()
    net.table = nn.Parameter(torch.tensor([7, 8]), requires_grad=False)

    floats, integers = state_of(net)

    assert floats.numel() == 0
    assert integers.tolist() == [7, 8]


def test_a_module_without_state() -> None:
    layout = Layout.of(nn.ReLU())

    assert (layout.entries, layout.parameters, layout.floats, layout.integers) == ((), 0, 0, 0)


def test_complex_state_is_an_error_that_names_it() -> None:
    net = nn.Module()
    net.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    with pytest.raises(SpecError, match=r"phase of the model is complex .*view_as_real"):
        Layout.of(net)


def test_lazy_state_is_an_error_that_names_it() -> None:
    with pytest.raises(SpecError, match="weight of the model has no shape yet"):
        Layout.of(nn.LazyLinear(2))


def test_another_model_is_an_error() -> None:
    layout = Layout.of(nn.Linear(1, 1))

    # a broadcast would accept this and fill five weights with one number
    with pytest.raises(SpecError, match=r"no weight of shape \[1, 1\]"):
        scatter(*vectors(layout), nn.Linear(5, 1), layout)
    with pytest.raises(SpecError, match="no weight"):
        gather(nn.ReLU(), layout, *vectors(layout))


@pytest.mark.parametrize("error", [-1, 1])
def test_vectors_of_the_wrong_length_are_rejected(error: int) -> None:
    net = nn.Linear(2, 2)
    layout = Layout.of(net)
    floats = torch.zeros(layout.floats + error)

    with pytest.raises(InvalidUpdate) as caught:
        scatter(floats, torch.zeros(0, dtype=torch.int64), net, layout)
    assert caught.value.reason == "length"


def test_json_round_trip_and_digest() -> None:
    layout = Layout.of(Net())

    again = Layout.from_json(layout.to_json())

    assert again == layout
    assert again.digest() == layout.digest() == Layout.of(Net()).digest()
    assert len(layout.digest()) == 64
    assert layout.digest() != Layout.of(nn.Linear(1, 1)).digest()


@pytest.mark.parametrize("text", ["", "{}x", "3", "[3]", '[{"name": "a"}]', "null"])
def test_a_damaged_layout_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointDamaged):
        Layout.from_json(text)


def test_named_tensors_can_be_saved_and_loaded_without_vcasgd(tmp_path: Path) -> None:
    source, target = Net(), Net()
    source.norm(torch.randn(8, 3))
    file = tmp_path / "model.safetensors"

    save_file(named_tensors(Layout.of(source), *state_of(source)), file)
    loaded = load_file(file)
    missing = target.load_state_dict(loaded, strict=False).missing_keys

    assert missing == ["decoder.weight"]  # tied to encoder.weight, so saved once
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name
