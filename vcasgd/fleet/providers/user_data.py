"""User data: how a machine of a cloud learns what to run.

A launch adds one script to what the template has for cloud-init. It writes what
:class:`~vcasgd.fleet.providers.base.Boot` says to a file and starts the unit of the template,
which runs :mod:`vcasgd.fleet.machine.main`::

    /etc/vcasgd/worker.env     environment, also VCASGD_BOOT_ARGV and VCASGD_BOOT_SECRETS (JSON)
    /etc/vcasgd/worker.argv    what the unit runs, one argument in a line; written last
"""

from __future__ import annotations

import email
import json
import re
from collections.abc import Mapping
from email.message import Message
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText

from vcasgd.errors import InvalidRequest
from vcasgd.fleet.providers.base import Boot

#: where the images have vcasgd
MACHINE_PYTHON = "/opt/vcasgd/venv/bin/python"
#: what a machine runs
MACHINE_ARGV = (MACHINE_PYTHON, "-m", "vcasgd.fleet.machine.main")
ARGV_VARIABLE = "VCASGD_BOOT_ARGV"
SECRETS_VARIABLE = "VCASGD_BOOT_SECRETS"
REGION_VARIABLE = "VCASGD_BOOT_REGION"
#: of the mark between the parts; the same in every launch, so that a repeated one is the same
_BOUNDARY = "==vcasgd=="
_END = "VCASGD-END"

_SCRIPT = f"""#!/bin/sh
set -eu
umask 077
root="${{VCASGD_ROOT:-}}/etc/vcasgd"
mkdir -p "$root"
cat >"$root/worker.env" <<'{_END}'
%s{_END}
cat >"$root/worker.argv" <<'{_END}'
%s{_END}
# another root than the system's is one to look at
if [ -z "${{VCASGD_ROOT:-}}" ]; then
  systemctl enable vcasgd-worker.service || true
  systemctl start --no-block vcasgd-worker.service
fi
"""


def boot_environment(
    boot: Boot, kind: str, region: str, secrets: Mapping[str, str]
) -> dict[str, str]:
    """All that the machine is told. ``kind`` is that of its metadata server.

    Variables that ``secrets`` names are left out: the machine fetches them itself.
    """
    told = {name: value for name, value in boot.env.items() if name not in secrets}
    return {
        **told,
        "VCASGD_METADATA_KIND": kind,
        REGION_VARIABLE: region,
        ARGV_VARIABLE: json.dumps(boot.argv),
        SECRETS_VARIABLE: json.dumps(dict(secrets), sort_keys=True),
    }


def worker_script(environment: Mapping[str, str]) -> str:
    """A shell script. Raises :class:`~vcasgd.errors.InvalidRequest` for what no file of that
    form can hold."""
    lines = "".join(f"{name}={_quoted(name, environment[name])}\n" for name in sorted(environment))
    return _SCRIPT % (lines, "".join(f"{word}\n" for word in MACHINE_ARGV))


def combined(template: str, script: str, limit_bytes: int) -> str:
    """The template's own user data and the script after it, as cloud-init takes several parts.

    Raises :class:`~vcasgd.errors.InvalidRequest` if it is too much for the cloud.
    """
    whole = MIMEMultipart(boundary=_BOUNDARY)
    for part in (*_parts(template), _part(script, "x-shellscript")):
        whole.attach(part)
    text = whole.as_string()
    if len(text.encode()) > limit_bytes:
        raise InvalidRequest(
            f"the user data of a machine would have {len(text.encode())} bytes, "
            f"and the cloud takes {limit_bytes}",
            remedy="shorten the template's own",
        )
    return text


def _parts(user_data: str) -> list[Message]:
    if not user_data.strip():
        return []
    if re.match(r"(?i)(content-type|mime-version):", user_data):
        message = email.message_from_string(user_data)
        payload = message.get_payload()
        return (
            [part for part in payload if isinstance(part, Message)]
            if isinstance(payload, list)
            else [message]
        )
    if user_data.startswith("#!"):
        return [_part(user_data, "x-shellscript")]
    return [_part(user_data, "cloud-config")]


def _part(text: str, kind: str) -> Message:
    charset = "us-ascii" if text.isascii() else "utf-8"
    return MIMEText(text, kind, charset)


def _quoted(name: str, value: str) -> str:
    """As systemd and the shell both read it (systemd.exec(5), EnvironmentFile=)."""
    if "\n" in value or "\0" in value:
        raise InvalidRequest(f"{name}: a value must be one line")
    return '"' + re.sub(r'([\\"$`])', r"\\\1", value) + '"'
