"""Capture of what a worker prints and logs."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import pytest
from support.waiting import PATIENCE

from vcasgd.errors import StoreUnavailable
from vcasgd.limits import LOG_BURST_LINES, LOG_LINE_BYTES, LOG_LINES_PER_SECOND
from vcasgd.store.ledger.events import NewLine
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.worker.log_capture import LINES_KEPT, UNFINISHED_SECONDS, LineCapture


class Log:
    """Log of a worker that is captured; while it isn't ``available``, nothing can be sent."""

    def __init__(self) -> None:
        self.lines: list[NewLine] = []
        self.available, self.now = True, 0.0
        self.capture = LineCapture(cast("Jobs", self), "job", "worker", lambda: self.now)

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


@pytest.fixture
def log() -> Log:
    return Log()


@contextmanager
def handler_of(logger: logging.Logger) -> Iterator[None]:
    """Give a logger a handler of its own, as some libraries do."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("mine: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def test_captured_lines_are_kept_until_they_are_sent(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    log.available = False
    with log.capture.installed():
        sys.stdout.write("one\n\ntw")
        sys.stdout.write("o\nincomplete")
        sys.stderr.write("red\n")

    with pytest.raises(StoreUnavailable):
        log.capture.flush()
    log.available = True
    log.capture.flush()
    log.capture.flush()

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
def test_a_progress_bar_is_its_last_state(log: Log, written: list[str], seen: list[str]) -> None:
    with log.capture.installed():
        for text in written:
            sys.stderr.write(text)
    log.capture.flush()

    assert log.texts == seen


def test_a_long_progress_bar_is_shown_from_time_to_time(log: Log) -> None:
    with log.capture.installed():
        for at in range(100):
            sys.stderr.write(f"\r{at}%")
            log.now = at * UNFINISHED_SECONDS / 20
            log.capture.flush()
        assert 3 <= len(log.texts) <= 6
        log.capture.flush()
        sys.stderr.write("\r100%\n")
    log.capture.flush()

    assert log.texts[-1] == "100%"
    assert len(log.texts) == len(set(log.texts))


@pytest.mark.parametrize("pieces", [1, 1000])
def test_a_cut_line_says_how_much_is_missing(log: Log, pieces: int) -> None:
    with log.capture.installed():
        for _ in range(pieces):
            sys.stdout.write("x" * (20 * LOG_LINE_BYTES // pieces))
        sys.stdout.write("\n")
        sys.stdout.write("ü" * LOG_LINE_BYTES + "\n")
    log.capture.flush()

    first, second = log.texts
    assert first == "x" * LOG_LINE_BYTES + f" … {19 * LOG_LINE_BYTES:,} more characters"
    half = LOG_LINE_BYTES // 2
    assert second == "ü" * half + f" … {half:,} more characters"


def test_too_many_lines_are_counted(log: Log) -> None:
    for number in range(LINES_KEPT + 3):
        log.capture.add(str(number))

    log.capture.flush()

    assert len(log.lines) == LINES_KEPT + 1
    assert log.texts[-1].startswith("… 3 more lines were printed")


def test_a_chatty_worker_leaves_room_for_others(log: Log) -> None:
    def print_for(seconds: int) -> None:
        for _ in range(seconds):
            for number in range(LINES_KEPT):
                log.capture.add(f"line {number}")
            log.capture.flush()
            log.now += 1

    print_for(LOG_BURST_LINES // LINES_KEPT + 10)
    log.lines.clear()
    print_for(10)

    lines = [text for text in log.texts if not text.startswith("…")]
    assert len(lines) == 10 * LOG_LINES_PER_SECOND
    left_out = f"{LINES_KEPT - LOG_LINES_PER_SECOND:.0f} more lines"
    assert all(left_out in text for text in log.texts if text.startswith("…"))


def test_records_of_logging_have_their_levels(log: Log) -> None:
    with log.capture.installed():
        logging.getLogger("train").warning("slow %s", "disk")
        logging.getLogger().error("from the root logger")
        logging.getLogger("vcasgd.worker").info("an own detail")
        logging.getLogger("vcasgd.worker").error("an own problem\nwith a traceback")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", stacklevel=1)
    log.capture.flush()

    assert log.pairs[:4] == [
        ("warning", "train: slow disk"),
        ("error", "from the root logger"),
        ("error", "an own problem"),
        ("error", "with a traceback"),
    ]
    assert log.pairs[4][0] == "warning"
    assert "UserWarning: old" in log.pairs[4][1]


def test_a_traceback_is_complete(log: Log) -> None:
    with log.capture.installed():
        try:
            raise ValueError("no such column")
        except ValueError:
            logging.getLogger("train").exception("reading failed")
    log.capture.flush()

    assert log.pairs[0] == ("error", "train: reading failed")
    assert log.pairs[1] == ("error", "Traceback (most recent call last):")
    assert log.pairs[-1] == ("error", "ValueError: no such column")


@pytest.mark.parametrize("by_the_task", [False, True])
@pytest.mark.parametrize("propagates", [True, False])
def test_handlers_of_libraries_are_captured_once(
    log: Log, by_the_task: bool, propagates: bool
) -> None:
    logger = logging.getLogger(f"library-{propagates}")
    logger.propagate = propagates
    setups = [handler_of(logger), log.capture.installed()]

    with ExitStack() as stack:
        for setup in reversed(setups) if by_the_task else setups:
            stack.enter_context(setup)
        logger.warning("hello")
    log.capture.flush()

    assert log.pairs == [("err", "mine: hello")]


def test_threads_do_not_tear_one_anothers_lines(log: Log) -> None:
    turn = threading.Barrier(2)

    def write(first: str, second: str) -> None:
        sys.stdout.write(first)
        turn.wait(PATIENCE)
        sys.stdout.write(f"{second}\n")

    with log.capture.installed():
        threads = [threading.Thread(target=write, args=pair) for pair in (("a", "b"), ("c", "d"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    log.capture.flush()

    assert sorted(log.texts) == ["ab", "cd"]
