"""One machine with a warm standby, which continues from the last checkpoint.

The standby has imported torch and loaded the data, and waits for the lock that the machine holds
while it lives.
"""

from __future__ import annotations

import fcntl
import os

from checkpoints import load, save
from common import Notice, Reporter, Training, worker_options


def main() -> None:
    options = worker_options()
    notice, training = Notice(), Training(options)
    lock = os.open(options.folder / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    checkpoint, reporter = options.folder / "checkpoint.pt", Reporter(options)
    done = load(checkpoint, training)
    while True:
        training.backward()
        training.optimizer.step()
        done.steps += 1
        done.samples += options.batch
        reporter.step()
        if done.steps % options.sync_every == 0 or notice.given:
            save(checkpoint, training, done)
            reporter.commit(done.samples, training.model)
        if notice.given:
            break


if __name__ == "__main__":
    main()
