"""Command-line interface: ``vcasgd``.

``app``        assembles the commands
``output``     tables, JSON, and error messages
``connection`` API address and token
``jobfile``    job files with ``--set`` overrides
``stack``      up, down, status, doctor
``jobs``       submit, follow, and the other commands for jobs
``fleet``      workers, machines, pools, evict
``join``       joins a stack elsewhere with this machine
``top``        a live overview of the fleet
``money``      plan, cost, and the confirmation before a job costs money
``follow``     a job's progress on a terminal
``simulate``   a simulated job in this process
``demo``       a complete run in about a minute
"""

from vcasgd.cli.app import app, main

__all__ = ["app", "main"]
