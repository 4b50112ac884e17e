"""Convert the published CIFAR-10 archive: ``python prepare.py cifar-10-python.tar.gz``.

Writes ``data/cifar10.npz``. The archive is at https://www.cs.toronto.edu/~kriz/cifar.html. It
contains pickles, so its digest is compared with the published one first.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MD5 = "c58f30108f718f92721af3b95e74349a"


def main(archive: Path) -> None:
    digest = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    if digest != MD5:
        sys.exit(f"{archive} is not the published archive: its MD5 is {digest}, not {MD5}")
    with tarfile.open(archive) as tar:
        parts = {Path(each.name).name: each for each in tar.getmembers() if each.isfile()}
        train = [_part(tar, parts[f"data_batch_{nth}"]) for nth in range(1, 6)]
        test = [_part(tar, parts["test_batch"])]
    out = Path(__file__).parent / "data" / "cifar10.npz"
    out.parent.mkdir(exist_ok=True)
    np.savez(
        out,
        x_train=np.concatenate([pictures for pictures, _ in train]),
        y_train=np.concatenate([labels for _, labels in train]),
        x_test=test[0][0],
        y_test=test[0][1],
    )
    print(out)


def _part(tar: tarfile.TarFile, member: Any) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return pictures uint8 ``[n, 32, 32, 3]`` and labels uint8 ``[n]``."""
    file = tar.extractfile(member)
    assert file is not None
    part = pickle.load(file, encoding="bytes")
    pictures = part[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return pictures, np.array(part[b"labels"], np.uint8)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
