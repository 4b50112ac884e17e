"""Capture of what a worker prints and logs."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import cast

import pytest
from support.waiting import PATIENCE

from vcasgd.errors import StoreUnavailable
from vcasgd.limits import LOG_BURST_LINES, LOG_LINE_BYTES, LOG_LINES_PER_SECOND
from vcasgd.store.ledger.events import NewLine
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.worker.log_capture import LINES_KEPT, UNFINISHED_SECONDS, LineCapture


class Log:
    """Log of a job; while it isn't ``available``, nothing can be added."""

    def __init__(self) -> None:
        self.lines: list[NewLine] = []
        self.available = True

    def add_logs(self, _job: str, _worker: str, lines: list[NewLine]) -> None:
        if not self.available:
            raise StoreUnavailable("away")
        self.lines += lines

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(line.level, line.text) for line in self.lines]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def capture(log: Log, clock: Clock) -> LineCapture:
    return LineCapture(cast("Jobs", log), "job", "worker", clock)


@contextmanager
def handler_for(logger: logging.Logger, stream: object) -> Iterator[None]:
    handler = logging.StreamHandler(cast("StringIO", stream))
    handler.setFormatter(logging.Formatter("mine: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def test_captured_lines_are_kept_until_they_are_sent(
    capture: LineCapture, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    log.available = False
    with capture.installed():
        sys.stdout.write("one\n\ntw")
        sys.stdout.write("o\nincomplete")
        sys.stderr.write("red\n")

    with pytest.raises(StoreUnavailable):
        capture.flush()
    log.available = True
    capture.flush()
    capture.flush()

    assert log.pairs == [("out", "one"), ("out", "two"), ("err", "red"), ("out", "incomplete")]
    assert capsys.readouterr().out == "one\n\ntwo\nincomplete"


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        (["10%\r", "20%\r", "100%\n", "done\n"], ["100%", "done"]),
        (["\r10%", "\r20%", "\r100%\n"], ["100%"]),
        (["\r10%", "\r20%"], ["20%"]),
        (["from Windows\r\n", "two\r\n"], ["from Windows", "two"]),
        (["a\rb\rc\nd\re"], ["c", "e"]),
        (["\x1b[32mgreen\x1b[0m\n"], ["green"]),
    ],
)
def test_a_progress_bar_is_its_last_state(
    capture: LineCapture, log: Log, written: list[str], seen: list[str]
) -> None:
    with capture.installed():
        for text in written:
            sys.stderr.write(text)
    capture.flush()

    assert log.texts == seen


def test_a_long_progress_bar_is_shown_from_time_to_time(
    capture: LineCapture, log: Log, clock: Clock
) -> None:
    with capture.installed():
        for at in range(100):
            sys.stderr.write(f"\r{at}%")
            clock.now = at * UNFINISHED_SECONDS / 20
            capture.flush()
        assert 3 <= len(log.texts) <= 6
        capture.flush()
        sys.stderr.write("\r100%\n")
    capture.flush()

    assert log.texts[-1] == "100%"
    assert len(log.texts) == len(set(log.texts))


@pytest.mark.parametrize("pieces", [1, 1000])
def test_a_cut_line_says_how_much_is_missing(capture: LineCapture, log: Log, pieces: int) -> None:
    with capture.installed():
        for _ in range(pieces):
            sys.stdout.write("x" * (20 * LOG_LINE_BYTES // pieces))
        sys.stdout.write("\n")
        sys.stdout.write("ü" * LOG_LINE_BYTES + "\n")
    capture.flush()

    first, second = log.texts
    assert first == "x" * LOG_LINE_BYTES + f" … {19 * LOG_LINE_BYTES:,} more characters"
    half = LOG_LINE_BYTES // 2
    assert second == "ü" * half + f" … {half:,} more characters"


def test_too_many_lines_are_counted(capture: LineCapture, log: Log) -> None:
    for number in range(LINES_KEPT + 3):
        capture.add(str(number))

    capture.flush()

    assert len(log.lines) == LINES_KEPT + 1
    assert log.texts[-1].startswith("… 3 more lines were printed")


def test_a_chatty_worker_leaves_room_for_others(
    capture: LineCapture, log: Log, clock: Clock
) -> None:
    def print_for(seconds: int) -> None:
        for _ in range(seconds):
            for number in range(LINES_KEPT):
                capture.add(f"line {number}")
            capture.flush()
            clock.now += 1

    print_for(LOG_BURST_LINES // LINES_KEPT + 10)
    log.lines.clear()
    print_for(10)

    lines = [text for text in log.texts if not text.startswith("…")]
    assert len(lines) == 10 * LOG_LINES_PER_SECOND
    left_out = f"{LINES_KEPT - LOG_LINES_PER_SECOND:.0f} more lines"
    assert all(left_out in text for text in log.texts if text.startswith("…"))


def test_records_of_logging_have_their_levels(capture: LineCapture, log: Log) -> None:
    with capture.installed():
        logging.getLogger("train").warning("slow %s", "disk")
        logging.getLogger().error("from the root logger")
        logging.getLogger("vcasgd.worker").info("an own detail")
        logging.getLogger("vcasgd.worker").error("an own problem\nwith a traceback")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", stacklevel=1)
    capture.flush()

    assert log.pairs[:4] == [
        ("warning", "train: slow disk"),
        ("error", "from the root logger"),
        ("error", "an own problem"),
        ("error", "with a traceback"),
    ]
    assert log.pairs[4][0] == "warning"
    assert "UserWarning: old" in log.pairs[4][1]


def test_a_traceback_is_complete(capture: LineCapture, log: Log) -> None:
    with capture.installed():
        try:
            raise ValueError("no such column")
        except ValueError:
            logging.getLogger("train").exception("reading failed")
    capture.flush()

    assert log.pairs[0] == ("error", "train: reading failed")
    assert log.pairs[1] == ("error", "Traceback (most recent call last):")
    assert log.pairs[-1] == ("error", "ValueError: no such column")


def set_up_before(logger: logging.Logger, capture: LineCapture) -> None:
    with handler_for(logger, sys.stderr), capture.installed():
        logger.warning("hello")


def set_up_by_the_task(logger: logging.Logger, capture: LineCapture) -> None:
    with capture.installed(), handler_for(logger, sys.stderr):
        logger.warning("hello")


@pytest.mark.parametrize("case", [set_up_before, set_up_by_the_task])
@pytest.mark.parametrize("propagates", [True, False])
def test_handlers_of_libraries_are_captured_once(
    capture: LineCapture,
    log: Log,
    case: Callable[[logging.Logger, LineCapture], None],
    propagates: bool,
) -> None:
    logger = logging.getLogger(f"library-{propagates}")
    logger.propagate = propagates

    case(logger, capture)
    capture.flush()

    assert log.pairs == [("err", "mine: hello")]


def test_threads_do_not_tear_one_anothers_lines(capture: LineCapture, log: Log) -> None:
    turn = threading.Barrier(2)

    def write(first: str, second: str) -> None:
        sys.stdout.write(first)
        turn.wait(PATIENCE)
        sys.stdout.write(f"{second}\n")

    with capture.installed():
        threads = [threading.Thread(target=write, args=pair) for pair in (("a", "b"), ("c", "d"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    capture.flush()

    assert sorted(log.texts) == ["ab", "cd"]
