"""Desired and actual state to actions: the controller's only opinion, without any I/O.

``actions``     what may be decided
``decide``      what comes to an end, and the order of all
``allocation``  who gets which machine
``market``      what is bought: pool, zone, type, on demand or not
``prices``      what a machine is worth
``launch_names``  names of launches and markets

How machines are shared. One worker runs on one machine. First every job gets its minimum,
then every job what it desires, both in order of submission. A place is filled by, in this
order: a worker that the job has, an idle machine, the machine of a worker that another job
has too many, a machine that is booting, a launch. A machine with a notice is already lost,
so its replacement is ordered at the notice.

What is bought. Pools in the job's order. Within a pool where a measured sample costs least;
zones and types that cost up to :data:`SPREAD_PREMIUM` more are as good, of these the zone with
the fewest machines. Nothing above the maximum price of pool and job, nothing that the budget
does not pay for, nothing where labels forbid it. ``on_demand_minimum`` places take machines
without the risk only; the fallback buys the minimum without it once all spot markets of the job
have refused for long enough.

Who is replaced before it goes. A machine that the cloud advised to leave, and one that the
fallback bought while spot is for sale again, work on until as many others as are desired are at
work; then they are surplus. If no replacement is to be had they stay.

Why it does not flap. Whatever is decided stays decided while nothing else changes:

* no machine is ever moved, or replaced, because another one became cheaper: prices decide
  only what is bought next;
* a machine that costs more than it may is given up only after ``dear_seconds`` of that, so
  prices that oscillate around the maximum faster than that move nothing, and slower ones move
  a machine at most once in that time;
* a worker is moved to another job only for that job's minimum, and only from a job that
  has more than its own, so the other can't take it back;
* a surplus (a job desires fewer workers than it has) that no other job has a use for is
  stopped after it has lasted ``surplus_seconds``; the cheapest machines, and among equals
  the oldest, are the last to go;
* a machine without a worker is kept ``idle_seconds``: a following job finds it warm; not so if
  it was advised to leave, or if who pays for it has a budget and is not at work;
* a machine that has not joined is given up after its pool's ``boot_seconds``, or as soon as it
  says that its boot failed, and its zone left alone for a while; one that was joined after
  ``lost_seconds``, in which it still counts, so that a short disconnection neither kills nor
  doubles it;
* when Ray can't be reached nothing is held against any machine, and after a restart of
  the controller or of Ray all of these times begin anew;
* a market that refused is left alone until ``blocked_until``, see :mod:`vcasgd.backoff`; its other
  zones and the other pools are asked meanwhile.

Every action may be carried out twice. A launch has a token made from the market's count of
launches, so one whose outcome was not recorded is repeated under the same token, and the
provider starts nothing twice.
"""

from vcasgd.fleet.plan.actions import Action, Blame, Launch, StartWorker, StopWorker, Terminate
from vcasgd.fleet.plan.decide import decide
from vcasgd.fleet.plan.launch_names import launch_token, market_name
from vcasgd.fleet.plan.market import SPREAD_PREMIUM

__all__ = [
    "SPREAD_PREMIUM",
    "Action",
    "Blame",
    "Launch",
    "StartWorker",
    "StopWorker",
    "Terminate",
    "decide",
    "launch_token",
    "market_name",
]
