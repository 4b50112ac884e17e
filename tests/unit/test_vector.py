"""Conversion of a module's state to flat vectors, and back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from vcasgd.errors import CheckpointDamaged, SpecError
from vcasgd.learning.base import digest_of
from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.learning.vector import (
    PIECE_FLOATS,
    MappedVector,
    copy_floats,
    gather,
    gather_part,
    is_sound,
    scatter,
    scatter_part,
    shift_part,
    within,
)
from vcasgd.storage.model_checkpoints import file_of


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


def state_of(module: nn.Module) -> tuple[Tensor, Tensor]:
    return gather(module, Layout.of(module))


def test_parameters_come_first_then_statistics_and_integers_are_separate() -> None:
    assert Layout.of(Net()).entries == (
        TensorEntry("scale", (), TensorKind.PARAMETER, 0),
        TensorEntry("norm.weight", (3,), TensorKind.PARAMETER, 1),
        TensorEntry("norm.bias", (3,), TensorKind.PARAMETER, 4),
        TensorEntry("encoder.weight", (2, 3), TensorKind.PARAMETER, 7),
        TensorEntry("norm.running_mean", (3,), TensorKind.STATISTIC, 13),
        TensorEntry("norm.running_var", (3,), TensorKind.STATISTIC, 16),
        TensorEntry("mask", (2,), TensorKind.INTEGER, 0),
        TensorEntry("norm.num_batches_tracked", (), TensorKind.INTEGER, 2),
    )


def test_scatter_is_the_inverse_of_gather() -> None:
    source, target = Net(), Net()
    source.norm(torch.randn(8, 3))
    floats, integers = state_of(source)
    state = {name: each.clone() for name, each in source.state_dict().items()}
    with torch.no_grad():
        source.scale.fill_(100.0)  # The vector is a copy.

    scatter(floats, integers, target, Layout.of(target))

    for name, tensor in state.items():
        assert torch.equal(tensor, target.state_dict()[name]), name
    assert target.decoder.weight is target.encoder.weight


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


def test_frozen_parameters_of_any_type_are_in_no_vector() -> None:
    net = nn.Module()
    names = ["uint8", "int64", "bfloat16", "complex64", "bool"]
    for name in names:
        values = torch.ones(3, 2, dtype=getattr(torch, name))
        net.register_parameter(f"p_{name}", nn.Parameter(values, requires_grad=False))

    floats, integers = state_of(net)

    assert floats.numel() == integers.numel() == 0
    assert [each.dtype for each in Layout.of(net).base] == names


def test_buffers_are_in_the_base_if_the_task_says_so() -> None:
    net = nn.Module()
    net.register_buffer("quantized", torch.arange(6, dtype=torch.uint8).view(2, 3))
    net.register_buffer("scale", torch.ones(2))

    layout = Layout.of(net, ["quantized"])

    assert (layout.floats, layout.integers) == (2, 0)
    assert [(each.name, each.dtype) for each in layout.base] == [("quantized", "uint8")]
    with pytest.raises(SpecError, match="no persistent buffer missing"):
        Layout.of(net, ["missing"])


def test_the_digest_of_a_base_depends_on_values_and_not_on_memory() -> None:
    values = torch.randn(4, 6)
    transposed = values.t().contiguous().t()

    assert not transposed.is_contiguous()
    assert digest_of(transposed) == digest_of(values)
    values[3, 5] += 1e-6
    assert digest_of(transposed) != digest_of(values)
    assert digest_of(torch.tensor(1.0)) != digest_of(torch.tensor(2.0))
    assert len(digest_of(torch.empty(0))) == 32


def test_a_difference_names_the_tensor() -> None:
    same, changed, larger = Net(), Net(), Net()
    with torch.no_grad():
        changed.frozen[1] = 3.0
    larger.norm = nn.BatchNorm1d(4)

    assert Layout.of(Net()).difference(Layout.of(same)) is None
    assert Layout.of(Net()).difference(Layout.of(changed)) == "frozen"
    assert Layout.of(Net()).difference(Layout.of(larger)) == "norm.weight"
    assert Layout.of(nn.ReLU()).difference(Layout.of(nn.Linear(1, 1))) == "weight"


def test_a_layout_of_entries_alone_is_a_list_of_them() -> None:
    """Jobs and checkpoints of version 0.2.0 have such a text, and its digest."""
    text = Layout.of(nn.Linear(1, 1)).to_json()

    assert text.startswith("[{")
    assert Layout.from_json(text) == Layout.of(nn.Linear(1, 1))


def test_layouts_of_later_versions_are_refused() -> None:
    text = Layout.of(Net()).to_json().replace('"version":2', '"version":3')

    with pytest.raises(CheckpointDamaged, match="version 3 of the format is not supported"):
        Layout.from_json(text)


def test_complex_state_travels_as_real_numbers() -> None:
    net, other = nn.Linear(2, 1), nn.Linear(2, 1)
    net.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))
    other.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    layout = Layout.from_json(Layout.of(net).to_json())

    floats, integers = state_of(net)
    scatter(floats, integers, other, layout)

    assert floats.tolist()[3:] == [1, 2, 3, -4]
    assert torch.equal(other.phase, net.phase)
    file = b"".join(file_of(layout, {}, lambda: iter([floats]), integers))
    assert torch.equal(load(file)["phase"], net.phase)


def test_lazy_state_is_an_error_that_names_it() -> None:
    with pytest.raises(SpecError, match="weight of the model has no shape yet"):
        Layout.of(nn.LazyLinear(2))


def test_another_model_is_an_error() -> None:
    layout = Layout.of(nn.Linear(1, 1))

    # a broadcast would accept this and fill five weights with one number
    with pytest.raises(SpecError, match=r"no weight of shape \[1, 1\]"):
        scatter(*state_of(nn.Linear(1, 1)), nn.Linear(5, 1), layout)
    with pytest.raises(SpecError, match="no weight"):
        gather(nn.ReLU(), layout)


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


def test_a_file_can_be_loaded_without_vcasgd() -> None:
    source, target = Net(), Net()
    source.norm(torch.randn(8, 3))
    floats, integers = state_of(source)

    loaded = load(b"".join(file_of(Layout.of(source), {}, lambda: iter([floats]), integers)))
    missing = target.load_state_dict(loaded, strict=False).missing_keys

    # The first is in the base, and the second tied to encoder.weight, so saved once.
    assert missing == ["frozen", "decoder.weight"]
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
def test_any_part_of_a_vector_is_read_and_written_in_a_module(format_: torch.memory_format) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)).to(memory_format=format_)
    layout = Layout.of(module)
    whole, _ = gather(module, layout)

    for start, stop in ((0, 10), (7, 60), (50, layout.floats), (0, layout.floats)):
        part = torch.empty(stop - start)
        gather_part(module, layout, start, part)
        assert torch.equal(part, whole[start:stop])
        whole[start:stop] += 1
        shift_part(torch.ones(stop - start), start, module, layout)
        assert torch.equal(gather(module, layout)[0], whole)
        whole[start:stop] *= 2
        scatter_part(whole[start:stop], start, module, layout)
        assert torch.equal(gather(module, layout)[0], whole)
    assert module[0].weight.is_contiguous(memory_format=format_)


class TestMappedVector:
    def test_slices_share_its_memory(self) -> None:
        vector = MappedVector(5000)
        assert len(vector) == 5000
        assert vector[7:7].tolist() == []
        vector[1020:1030].copy_(torch.arange(10.0))
        part = within(vector, 1000, 2000)
        assert part[25:27].tolist() == [5.0, 6.0]
        part[0:2].fill_(7.0)
        assert vector[999:1003].tolist() == [0.0, 7.0, 7.0, 0.0]
        del vector
        assert part[20:23].tolist() == [0.0, 1.0, 2.0]

    def test_copies_are_made_in_pieces(self) -> None:
        floats = torch.arange(PIECE_FLOATS + 3.0)
        vector = MappedVector(len(floats))
        copy_floats(floats, vector)
        copy = vector.clone()
        vector[0:1].fill_(1.0)
        assert torch.equal(copy[:], floats)
        assert is_sound(copy)
        copy[PIECE_FLOATS + 1 : PIECE_FLOATS + 2].fill_(torch.nan)
        assert not is_sound(copy)

    def test_only_what_is_used_is_in_the_process(self) -> None:
        vector = MappedVector(64 << 20)
        before = _resident()
        for start in range(0, len(vector), 1 << 20):
            vector[start : start + (1 << 20)].fill_(1.0)
        assert _resident() - before < 32 << 20


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
