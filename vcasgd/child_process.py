"""Child processes: which variables they see, orphans, and the end of one that may not react."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
from collections.abc import Collection, Mapping
from typing import Any, Protocol

log = logging.getLogger(__name__)

#: Seconds in which a killed process ends, also one whose memory takes long to be freed.
KILL_SECONDS = 5.0
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36


class Killable(Protocol):
    """The methods of :class:`subprocess.Popen` that are used."""

    args: Any

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = ..., /) -> int: ...


def kill(process: Killable, seconds: float = KILL_SECONDS) -> int | None:
    """Kill a process, and return its exit status, or None if it hasn't ended after ``seconds``.

    A process that waits for a device or a network drive ends only when that answers.
    """
    process.kill()
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        log.error("%s can't be killed: it waits for a device", process.args)
        return None


def adopt_orphans() -> None:
    """Become the parent of orphans below this process, so that it can find them (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        log.warning("can't adopt orphans: %s", os.strerror(ctypes.get_errno()))


# --- variables that processes with code of others, such as workers, may see ------------------

#: Variables that a process needs to start and to find its libraries and processors. They are exact
#: names: keys of services begin like settings of libraries, such as NVIDIA_API_KEY.
_NAMES = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX",
     "SSL_CERT_FILE", "SSL_CERT_DIR", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_NUMERIC",
     "LC_TIME", "LC_COLLATE", "LC_MONETARY", "LC_MESSAGES", "PYTHONHOME", "PYTHONPATH",
     "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONUNBUFFERED",
     "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONFAULTHANDLER", "PYTHONWARNINGS",
     "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
     "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING", "NVIDIA_VISIBLE_DEVICES",
     "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE", "HIP_VISIBLE_DEVICES",
     "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "OMP_PROC_BIND", "OMP_PLACES",
     "OMP_DYNAMIC", "MKL_NUM_THREADS", "MKL_THREADING_LAYER", "PYTORCH_ALLOC_CONF",
     "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
)  # fmt: skip
#: Variables of vcasgd itself, among which is the token.
_OWN = "VCASGD_"


def hide_process() -> None:
    """Keep other processes of this user from reading this process's memory and environment.

    That is where the token is, and jobs without a sandbox run as the same user. The kernel then
    asks for CAP_SYS_PTRACE (proc(5), ptrace(2)). A program that this process runs is not hidden.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


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
        if not name.startswith(_OWN) and (ordered or name in _NAMES or name in named)
    }
