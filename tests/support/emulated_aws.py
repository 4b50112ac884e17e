"""Emulated AWS over HTTP (moto): ``python emulated_aws.py PORT``."""

from __future__ import annotations

import sys
from typing import Any

from moto.ec2.models.instances import Instance
from moto.server import main

_init = Instance.__init__


def _with_groups(self: Instance, *arguments: Any, **options: Any) -> None:
    """Keep the security groups of an instance's network interface, which moto drops."""
    _init(self, *arguments, **options)
    if not self.security_groups:
        self.security_groups = [each for nic in self.nics.values() for each in nic.group_set]


_terminate = Instance.terminate


def _with_free_addresses(self: Instance) -> Any:
    """Free the private addresses of an instance that ends, which moto keeps."""
    state = _terminate(self)
    for nic in self.nics.values():
        for row in nic.private_ip_addresses:
            nic.subnet.del_subnet_ip(row["PrivateIpAddress"])
    return state


if __name__ == "__main__":
    Instance.__init__ = _with_groups
    Instance.terminate = _with_free_addresses
    main(["-H", "127.0.0.1", "-p", sys.argv[1]])
