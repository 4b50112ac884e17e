"""A model is built without values, and cut into blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vcasgd
from vcasgd.errors import SpecError
from vcasgd.learning.local_model import LocalModel
from vcasgd.learning.sharded_model import ShardedModel, blocks_of, build_empty, is_sharded


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(experts))


class Model(nn.Module):
    """``random``: draws a constant; ``frozen``: has a frozen parameter."""

    def __init__(self, *, random: bool = False, frozen: bool = False, real: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4).requires_grad_(not frozen)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.last = nn.Linear(4, 8, bias=False)
        self.tied = nn.Linear(4, 8, bias=False)
        self.tied.weight = self.last.weight
        own = nn.Parameter(torch.empty(5, 2).t())
        self.own = own
        nn.init.normal_(own)
        constant = torch.rand(3) if random else torch.arange(3.0)
        self.register_buffer("constant", constant, persistent=False)
        if real:
            assert float(self.last.weight.detach().sum()) != 0


class Built(vcasgd.Task):
    def __init__(self, **options: bool) -> None:
        self.options = options

    def model(self) -> nn.Module:
        return Model(**self.options)


def test_a_model_is_built_without_values_of_its_parameters() -> None:
    module = build_empty(Built(), 0)
    assert all(each.is_meta for each in module.parameters())
    assert torch.equal(module.constant, torch.arange(3.0))
    assert module.tied.weight is module.last.weight
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("option", ["random", "frozen", "real"])
def test_a_model_that_needs_its_values_has_them(option: str) -> None:
    torch.manual_seed(7)
    module, plain = build_empty(Built(**{option: True}), 7), Model(**{option: True})
    for name, each in module.named_parameters():
        assert torch.equal(each, plain.get_parameter(name))
    assert torch.equal(module.constant, plain.constant)


@pytest.mark.parametrize("option", [None, "random", "frozen"])
def test_a_model_that_is_built_in_pieces_is_the_usual_one(option: str | None) -> None:
    task = Built(**({option: True} if option else {}))
    floats, integers = ShardedModel(task, 7, "cpu").initial()
    usual, counters = LocalModel(task, 7, "cpu").initial()
    assert torch.equal(floats[:], usual[:])
    assert torch.equal(integers, counters)


def test_blocks_are_those_of_the_list_with_the_most_parameters() -> None:
    model = Model()
    assert blocks_of(model) == list(model.blocks)
    assert blocks_of(nn.Linear(2, 2)) == []


def test_blocks_are_of_the_given_types_inner_ones_first() -> None:
    model = Model()
    found = blocks_of(model, [Block, "ModuleList"])
    assert found.index(model.blocks[1].experts) < found.index(model.blocks[1])
    assert len(found) == 3 + 4
    with pytest.raises(SpecError, match="the model has no Layer") as refused:
        blocks_of(model, ["Layer"])
    assert "Block" in str(refused.value.remedy)


def test_float16_is_refused() -> None:
    task = Built()
    task.parallel, task.mixed_precision = "fsdp", "fp16"
    with pytest.raises(SpecError, match="fp16"):
        is_sharded(task)
