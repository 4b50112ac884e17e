"""User data that passes a :class:`~vcasgd.fleet.providers.base.Boot` to a machine in a cloud.

A launch appends one script to the template's data for cloud-init. The script writes these files and
starts the template's unit, which runs :mod:`vcasgd.machine.main`::

    /etc/vcasgd/worker.env     environment, with VCASGD_BOOT_ARGV and VCASGD_BOOT_SECRETS (JSON)
    /etc/vcasgd/worker.argv    command of the unit, one argument per line; written last
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

#: Python with vcasgd in the images.
MACHINE_PYTHON = "/opt/vcasgd/venv/bin/python"
#: Command of a machine's unit.
MACHINE_ARGV = (MACHINE_PYTHON, "-m", "vcasgd.machine.main")
#: Boot command, as JSON.
ARGV_VARIABLE = "VCASGD_BOOT_ARGV"
#: Secrets that the machine fetches, as JSON: variable to name.
SECRETS_VARIABLE = "VCASGD_BOOT_SECRETS"
#: Region of the pool.
REGION_VARIABLE = "VCASGD_BOOT_REGION"
#: Separator of the parts; equal in every launch, so that a repeated launch has equal user data.
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
# With another root, only write the files.
if [ -z "${{VCASGD_ROOT:-}}" ]; then
  systemctl enable vcasgd-worker.service || true
  systemctl start --no-block vcasgd-worker.service
fi
"""


def boot_environment(
    boot: Boot, kind: str, region: str, secrets: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the machine. ``kind`` is that of its metadata server.

    It lacks the variables in ``secrets``, which the machine fetches itself.
    """
    plain = {name: value for name, value in boot.env.items() if name not in secrets}
    return {
        **plain,
        "VCASGD_METADATA_KIND": kind,
        REGION_VARIABLE: region,
        ARGV_VARIABLE: json.dumps(boot.argv),
        SECRETS_VARIABLE: json.dumps(dict(secrets), sort_keys=True),
    }


def worker_script(environment: Mapping[str, str]) -> str:
    """Return the shell script.

    Raises :class:`~vcasgd.errors.InvalidRequest` for a value that an environment file can't hold.
    """
    lines = "".join(f"{name}={_quoted(name, environment[name])}\n" for name in sorted(environment))
    return _SCRIPT % (lines, "".join(f"{word}\n" for word in MACHINE_ARGV))


def combined(template: str, script: str, limit_bytes: int) -> str:
    """Return multipart data for cloud-init: the template's own, followed by the script.

    Raises :class:`~vcasgd.errors.InvalidRequest` if it exceeds the cloud's limit.
    """
    whole = MIMEMultipart(boundary=_BOUNDARY)
    for part in (*_parts(template), _part(script, "x-shellscript")):
        whole.attach(part)
    text = whole.as_string()
    if len(text.encode()) > limit_bytes:
        raise InvalidRequest(
            f"the user data has {len(text.encode())} bytes, and the cloud's limit is {limit_bytes}",
            remedy="shorten the template's user data",
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
    """Quote a value for both systemd and the shell (systemd.exec(5), EnvironmentFile=)."""
    if "\n" in value or "\0" in value:
        raise InvalidRequest(f"{name}: the value must be one line")
    return '"' + re.sub(r'([\\"$`])', r"\\\1", value) + '"'
