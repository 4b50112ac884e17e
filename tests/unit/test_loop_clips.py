"""Calls of a loop that clip are made again, unless it has changed the gradients since."""

import pytest
import torch
from torch import Tensor, nn

from vcasgd.task.loop_clips import LoopClips


def clipped(*values: float) -> tuple[LoopClips, Tensor]:
    """Clip a gradient at these values, one after the other."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, -1.0])
    clips = LoopClips()
    for value in values:
        clip_at(clips, parameter, value)
    return clips, parameter


def clip_at(clips: LoopClips, parameter: Tensor, value: float) -> None:
    def clip() -> None:
        nn.utils.clip_grad_value_([parameter], value)

    clips.clip([parameter], clip, clip)


def test_a_step_gets_the_gradient_before_all_calls() -> None:
    clips, parameter = clipped(2.0, 0.5)

    before, calls = clips.take([parameter])

    assert torch.equal(before[parameter], torch.tensor([3.0, -1.0]))
    assert len(calls) == 2
    parameter.grad = torch.tensor([0.1, -9.0])
    for call in calls:
        call()
    assert torch.equal(parameter.grad, torch.tensor([0.1, -0.5]))
    assert clips.take([parameter]) == ({}, [])


def test_a_gradient_that_was_changed_since_is_kept() -> None:
    clips, parameter = clipped(2.0)
    assert parameter.grad is not None
    parameter.grad.mul_(0.1)

    assert clips.take([parameter]) == ({}, [])


def test_only_the_last_call_is_made_again_after_a_further_backward() -> None:
    clips, parameter = clipped(2.0)
    (parameter * torch.tensor([1.0, 1.0])).sum().backward()
    clip_at(clips, parameter, 1.0)

    before, calls = clips.take([parameter])

    assert torch.equal(before[parameter], torch.tensor([3.0, 0.0]))
    assert len(calls) == 1


def test_each_call_is_of_the_first_step_that_it_concerns() -> None:
    clips, first = clipped()
    second = nn.Parameter(torch.zeros(1))
    second.grad = torch.ones(1)
    clips.clip([first, second], lambda: None, lambda: None)

    assert len(clips.take([first])[1]) == 1
    before, calls = clips.take([second])
    assert torch.equal(before[second], torch.ones(1))
    assert not calls


def test_steps_that_are_kept_leave_nothing() -> None:
    clips, parameter = clipped(2.0)

    clips.forget()

    assert clips.take([parameter]) == ({}, [])


@pytest.mark.parametrize(("clips_follow", "left"), [(False, [2.0, 2.0]), (True, [1.0, 1.0])])
def test_changes_are_made_again_with_the_calls_that_follow(
    clips_follow: bool, left: list[float]
) -> None:
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]

    def change() -> None:
        for each in parameters:
            assert each.grad is not None
            each.grad.clamp_(max=2.0)

    for each in parameters:
        each.grad = torch.full([1], 5.0)
    clips = LoopClips()
    clips.expect(parameters, lambda: change, clips_follow=clips_follow)
    change()
    for each in parameters:
        clip_at(clips, each, 1.0)

    taken = [clips.take([each]) for each in parameters]

    assert [before[each] for (before, _), each in zip(taken, parameters, strict=True)] == [5.0, 5.0]
    for each in parameters:
        each.grad = torch.full([1], 7.0)
    for _, calls in taken:
        for again in calls:
            again()
    assert [each.grad for each in parameters] == left


def test_a_further_computation_replaces_what_was_expected() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    clips = LoopClips()
    clips.expect([parameter], lambda: lambda: None)

    clips.expect([parameter], None)

    assert clips.take([parameter]) == ({}, [])
