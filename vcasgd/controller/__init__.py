"""The controller: observe, decide, act, for ever. Run as ``python -m vcasgd.controller``.

``process``     the process: both loops under one lease
``fleet_loop``  one round after the other
``observing``   what there is, as plain data for :mod:`vcasgd.fleet.plan`
``demands``     what jobs ask for, within their budgets and their labels
``acting``      carries out what was decided
``learners``    how many each machine carries for its job
``boots``       what a new machine runs
``telling``     what others see of the fleet
``parts``       what these share:
``providers``   where machines come from, as the pools file says now
``listing``     what the clouds say of machines and prices
``memory``      how pools and markets answered
``bookkeeping`` what machines cost whom
``speeds``      how fast machines are
``guard``       which pools may see which jobs
``names``       of workers

It holds a lease in the ledger, so a second one stands by. Killed at any line and started
again it finds its machines by their tag, its workers through Ray, its jobs in the ledger.
When Ray's head dies this process ends and is started again, which is the way on that
:class:`~vcasgd.cluster.Cluster` describes; jobs go on meanwhile.
"""
