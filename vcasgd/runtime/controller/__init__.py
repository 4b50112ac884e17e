"""The controller: observe, decide, act, for ever. Run as ``python -m vcasgd.runtime.controller``.

``process``     the process: both loops under one lease
``fleet_loop``  one round after the other
``observing``   what there is, as plain data for :mod:`vcasgd.fleet.plan`
``acting``      carries out what was decided
``telling``     what others see of the fleet
``providers``   where machines come from
``names``       of workers

It holds a lease in the ledger, so a second one stands by. Killed at any line and started
again it finds its machines by their tag, its workers through Ray, its jobs in the ledger.
When Ray's head dies this process ends and is started again, which is the way on that
:class:`~vcasgd.runtime.cluster.Cluster` describes; jobs go on meanwhile.
"""
