"""The traced task as an ordinary script."""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

import vcasgd
from vcasgd.chaos.task.audit import CountingModel, Indices

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--batch_size", type=int, required=True)
parser.add_argument("--step_seconds", type=float, default=0.0)
parser.add_argument("--copies", type=int, default=1)
parser.add_argument("--trace", required=True)
parser.add_argument("--hold", type=Path, help="steps take time while this file exists")
options = parser.parse_args()


def main() -> None:
    trace = os.open(options.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    model, data = CountingModel(options.samples, options.copies), Indices(options.samples)
    session = vcasgd.Session(model, torch.optim.SGD(model.parameters(), lr=1.0))

    @session.evaluation(data)
    def counted(model, batch):
        return {"count": torch.tensor(len(batch)), "applied": model(batch).sum() / options.copies}

    for batch in session.batches(data, options.batch_size):
        samples = " ".join(str(sample) for sample in batch.tolist())
        os.write(trace, f"{os.getpid()} {samples}\n".encode())
        if options.hold and options.hold.exists():
            time.sleep(options.step_seconds)
        vcasgd.log({"samples": len(batch)})
        session.step(-model(batch).sum())
    sys.stdout.write(f"the end: {session.metrics}\n")


if __name__ == "__main__":
    main()
