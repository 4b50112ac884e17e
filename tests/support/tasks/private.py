"""Counting task that needs a secret, a package, and the file that a setup command makes.

It shows the secret wherever a careless task could: in its output, in its logs, and in an error.
"""

import hashlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import greeting
from audit import Audit
from torch import Tensor, nn

HERE = Path(__file__).parent


class Private(Audit):
    def __init__(self, *, fails: bool = False, **args: Any) -> None:
        super().__init__(**args)
        self.token, self.fails = os.environ["API_TOKEN"], fails
        assert (HERE / "made-by-setup").read_text() == f"{os.environ['PLAIN']}\n"
        digest = hashlib.sha256(self.token.encode()).hexdigest()
        sys.stdout.write(f"digest {digest} {greeting.text}\n")
        sys.stdout.write(f"token {self.token} lines {os.environ['PEM'].splitlines()}\n")
        sys.stderr.write(f"https://user:{self.token}@example.com\n")
        logging.getLogger("private").warning("authorised by %s", self.token)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError(f"401 for {self.token}")
        return super().loss(model, batch)
