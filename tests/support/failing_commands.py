"""Run a machine's script with each of its commands failing once, on a root of small programs.

A program of the root does what a machine's would, for the script that runs, and counts its calls.
The one that fails prints a part of an answer before it does.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from support.machine_roots import INFRA, write_root
from support.processes import run_program

#: Text of a command that fails.
PART = "a part of an answer"
_PROLOGUE = """#!/bin/bash
set -o noclobber
name=${0##*/} number=1
until { true >"@calls/$name.$number"; } 2>/dev/null; do number=$((number + 1)); done
set +o noclobber
if [ "$name.$number" = "${FAILING:-}" ]; then echo "@part"; exit 2; fi
"""
#: Programs of the system that run as they are.
_REAL = (
    "awk base64 cat chmod cmp cut env grep install jq ln mkdir mktemp mv rm sed sha256sum tee touch"
)
#: Commands that change the system, or take long.
_BEHAVIORS = {
    "apt-get": "",
    "chgrp": "",
    "chown": 'echo "$*" >>"$VCASGD_ROOT/chown"',
    # Without its owners, who exist on machines only
    "install": 'arguments=(); while [ $# -gt 0 ]; do case "$1" in -o | -g) shift ;; '
    '*) arguments+=("$1") ;; esac; shift; done; exec @real "${arguments[@]}"',
    "mkfs.ext4": 'echo formatted >"$VCASGD_ROOT/formatted"',
    "mount": "",
    "mountpoint": "exit 1",
    "resize2fs": "",
    "dpkg": "exit 1",
    "id": "exit 1",
    "useradd": "",
    "sleep": "",
    "shutdown": "",
    "systemctl": '[ "$1" = show ] && echo exit-code; echo "$*" >>"$VCASGD_ROOT/systemctl"',
    "openssl": """
case "$*" in
  rand*) printf '%048d\\n' 7 ;;
  *subjectAltName\\ *) printf 'X509v3 Subject Alternative Name: \\n    DNS:localhost\\n' ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in -out | -keyout) echo "made" >"$2" ;; esac
  shift
done""",
    "python3": """
for program in pip python; do
  mkdir -p "$3/bin"; cp "$VCASGD_ROOT/programs/venv-$program" "$3/bin/$program"
done""",
    "venv-pip": '[[ "$*" != *awscli* ]] || cp "$VCASGD_ROOT/programs/aws" "${0%/*}/aws"',
    "venv-python": 'touch "${!#}/key.pem"; echo VCASGD_JOIN_PIN=a-pin',
    "aws": """
case "$*" in
  *get-secret-value*)
    if [ -e "$VCASGD_ROOT/stored/$4" ]; then cat "$VCASGD_ROOT/stored/$4"; else
      echo "can't find the specified secret value" >&2; exit 254; fi ;;
  *put-secret-value*) mkdir -p "$VCASGD_ROOT/stored/mine"; cat >"$VCASGD_ROOT/stored/$4" ;;
  *AuthTokenEnabled*) echo False ;;
  *modify-replication-group*) cp "${4#file://}" "$VCASGD_ROOT/modified" ;;
  *s3\\ cp*) for each in "$@"; do case "$each" in
    /*.crt | /*.pem | /*.txt | /*.whl) [ -e "$each" ] || echo fetched >"$each" ;; esac; done ;;
esac""",
    "curl": """
url=; for each in "$@"; do case "$each" in http*) url="$each" ;; esac; done
name=${url##*/secrets/}; name=${name%%[/:]*}
case "$url" in
  *default/token) echo '{"access_token": "a-token"}' ;;
  *:access)
    if [ -e "$VCASGD_ROOT/stored/$name" ]; then
      printf '{"payload": {"data": "%s"}}\\n200' "$(base64 -w0 "$VCASGD_ROOT/stored/$name")"
    else printf '{}\\n404'; fi ;;
  *:addVersion) mkdir -p "$VCASGD_ROOT/stored"
    jq -r .payload.data | base64 -d >"$VCASGD_ROOT/stored/$name" ;;
  *authString) echo '{"authString": "made-by-google"}' ;;
  *latest/api/token) echo a-token ;;
  *security-credentials/a-role)
    echo '{"AccessKeyId": "a", "SecretAccessKey": "b", "Token": "c"}' ;;
  *security-credentials/) echo a-role ;;
  *guest-attributes* | *ec2.*) echo told >"$VCASGD_ROOT/told" ;;
  *meta-data*) echo a-value ;;
esac""",
}
_RANDOM = re.compile(r"[0-9a-f]{48}")


@dataclass(frozen=True)
class Script:
    """A script of ``infra/bin`` with its arguments, and its machine's settings and files."""

    name: str
    settings: str
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    #: Calls that the script can do without.
    tolerated: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """Exit status of a run, and what it left: text by path."""

    status: int
    said: str
    left: Mapping[str, str]
    calls: frozenset[str]


def run_script(script: Script, root: Path, failing: str = "", patience_seconds: int = 0) -> Outcome:
    """Run it on a new root. ``failing`` names a call, such as ``jq.2``."""
    _prepare(root, script)
    done = run_program(
        [shutil.which("bash") or "", INFRA / "bin" / script.name, *script.arguments],
        env={
            "PATH": str(root / "programs"),
            "VCASGD_ROOT": str(root),
            "VCASGD_METADATA_URL": "http://metadata",
            "PATIENCE_SECONDS": str(patience_seconds),
            "FAILING": failing,
            "TMPDIR": str(root / "temporary"),
        },
        stdin=subprocess.DEVNULL,
    )
    calls = frozenset(path.name for path in (root / "calls").iterdir())
    return Outcome(done.returncode, done.stderr, dict(_left(root)), calls)


def run_failing(script: Script, folder: Path, clean: Outcome) -> dict[str, Outcome]:
    """Run the script once for each call of a clean run, and return the outcomes by failing call."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(
            lambda call: (call, run_script(script, folder / call, call)),
            sorted(clean.calls - script.tolerated),
        )
        return dict(outcomes)


def _prepare(root: Path, script: Script) -> None:
    write_root(root, script.settings)
    for name in ("programs", "calls", "temporary", "dev/disk/by-id", "etc/nginx/sites-enabled"):
        (root / name).mkdir(parents=True)
    (root / "etc/systemd/system").mkdir(parents=True)
    for path, text in script.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    _write_programs(root, script)


def _write_programs(root: Path, script: Script) -> None:
    programs = root / "programs"
    (programs / "bash").symlink_to(shutil.which("bash") or "")
    prologue = _PROLOGUE.replace("@calls", str(root / "calls")).replace("@part", PART)
    for name in _REAL.split():
        _write_program(programs / name, f'{prologue}exec {shutil.which(name)} "$@"')
    for name, behavior in _BEHAVIORS.items():
        behavior = behavior.replace("@real", shutil.which(name) or "")
        # Its own commands are not those of the script.
        _write_program(programs / name, f"{prologue}PATH={os.environ['PATH']}\n{behavior}\n")
    if script.name != "boot":
        tools = root / "opt/vcasgd/tools/bin"
        tools.mkdir(parents=True)
        shutil.copy(programs / "aws", tools)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(stat.S_IRWXU)


def _left(root: Path) -> Iterator[tuple[str, str]]:
    """Yield relative paths and texts, with the same text for every random one."""
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        skipped = name.startswith(("programs", "temporary", "usr", "calls")) or "/bin/" in name
        if path.is_file() and not skipped:
            yield name, _RANDOM.sub("random", path.read_text().replace(str(root), ""))
