"""Runs of the command line in this process, and a job file for them."""

from __future__ import annotations

from collections.abc import Callable

from click.testing import Result

Run = Callable[..., Result]

JOB_FILE = """
name: digits
task: train:Digits
epochs: 2
workers: {pools: [local]}
subtasks_per_epoch: 5
"""


def stdout_of(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout
