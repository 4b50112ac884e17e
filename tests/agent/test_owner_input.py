"""The owner's input: on a real terminal, and in desktops by the words of logind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.waiting import await_truth

from vcasgd.agent import availability
from vcasgd.agent.availability import OwnerInput, desktop_inputs
from vcasgd.errors import SpecError

NOW = 1_800_000_000.0


def session(**properties: str) -> str:
    given = {"Type": "wayland", "Active": "yes", "IdleHint": "no", "IdleSinceHint": "0"}
    return "".join(f"{name}={value}\n" for name, value in {**given, **properties}.items())


IDLE = {"IdleHint": "yes", "IdleSinceHint": "1799999000000000"}


@pytest.mark.parametrize(
    ("shown", "inputs"),
    [
        ("", []),
        (session(), [NOW]),
        (session(**IDLE), [1_799_999_000.0]),
        (session(IdleHint="yes", IdleSinceHint=""), [NOW]),
        (session(Type="tty"), []),
        (session(Active="no"), []),
        (session(Type="unspecified") + "\n" + session(Type="x11", **IDLE), [1_799_999_000.0]),
    ],
    ids=["none", "used", "idle", "unknown", "terminal", "of another user", "two"],
)
def test_desktops(shown: str, inputs: list[float]) -> None:
    assert list(desktop_inputs(shown, NOW)) == inputs


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A terminal without input for an hour: the ends of its keyboard and its program."""
    monkeypatch.setattr(availability, "LOOK_SECONDS", 0.0)
    keyboard, program = os.openpty()
    hour_ago = time.time() - 3600
    os.utime(os.ttyname(program), (hour_ago, hour_ago))
    yield keyboard, program
    os.close(keyboard)
    os.close(program)


def test_input_on_a_terminal_is_seen(terminal: tuple[int, int], tmp_path: Path) -> None:
    # Given that terminal alone
    keyboard, program = terminal
    (tmp_path / "pts").mkdir()
    (tmp_path / "pts" / "0").symlink_to(os.ttyname(program))
    clock = [time.time()]
    owner = OwnerInput(timedelta(minutes=10), tmp_path, lambda: clock[0])
    assert not owner.is_recent
    # also if the clock is set to a time before its last input
    clock[0] -= 7200
    assert not owner.is_recent
    clock[0] += 7200

    # When its program prints something
    os.write(program, b"still training\n")
    assert not owner.is_recent

    # and then somebody presses a key
    os.write(keyboard, b"\n")
    os.read(program, 1)

    # Then it is in use
    await_truth(lambda: owner.is_recent)
    # also if the clock is set
    clock[0] += 7200
    assert owner.is_recent


def test_time_is_checked() -> None:
    assert "10:00" in str(OwnerInput.parse("10m"))
    with pytest.raises(SpecError, match="not a duration"):
        OwnerInput.parse("soon")
