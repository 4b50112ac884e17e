"""Variables of this machine that a worker, which runs code of others, may see."""

from __future__ import annotations

from collections.abc import Collection, Mapping

#: Variables that a process needs to start and to find its libraries and processors.
_NAMES = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
     "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR")
)  # fmt: skip
_PREFIXES = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "OMP_", "MKL_", "PYTORCH_")
#: Variables of vcasgd itself, among which is the token.
_OWN = "VCASGD_"


def visible(
    variables: Mapping[str, str], named: Collection[str] = (), *, ordered: bool = False
) -> dict[str, str]:
    """Return the variables that workers get.

    ``named``: others that the machine's owner allows. ``ordered``: the stack ordered the machine,
    which then has no other purpose, so its workers get all of them but vcasgd's own.
    """
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(_OWN)
        and (ordered or name in _NAMES or name in named or name.startswith(_PREFIXES))
    }
