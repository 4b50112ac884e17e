"""The digits as an ordinary training script, with four lines for vcasgd.

python examples/digits/script.py                          # here, in this process
vcasgd submit examples/digits/script.yaml --follow        # on machines that come and go
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

import vcasgd
from digits import images, judge, network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.025)
    parser.add_argument("--epochs", type=int, default=20, help="a job's are in script.yaml")
    options = parser.parse_args()

    model = network(options.channels)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)

    # Parts of four samples are enough for the statistics of BatchNorm here.
    session = vcasgd.Session(model, optimizer, min_local_batch=4)
    session.evaluation(images("validation"))(judge)
    for pixels, labels in session.batches(images("train"), batch_size=16, epochs=options.epochs):
        session.step(F.cross_entropy(model(pixels), labels))

    # On a worker the script ends inside the loop; the job's model is in its checkpoints.
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
