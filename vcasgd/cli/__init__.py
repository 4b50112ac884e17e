"""The command line: ``vcasgd``.

``app``        the commands, joined
``output``     tables, JSON, errors
``connection`` which API to talk to
``stack``      up, down, status
``jobs``       submit, follow, and all that is done with a job
``fleet``      workers, instances, pools, evict
``money``      plan, cost, and the question before a job is bought
``progress``   the live view of a job
``demo``       the whole product in a minute
"""

from vcasgd.cli.app import app, main

__all__ = ["app", "main"]
