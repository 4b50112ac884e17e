"""Fault injection on a real stack during a job that counts lost and repeated samples.

``command``   ``vcasgd chaos``
``audit``     kills of every kind of process
``killers``   those faults, with checks that they fired and that the stack recovered
``scenario``  faults at given times, and what they may cost
``run``       the run of a scenario
``faults``    frozen processes, slow and full disks, a pool with fewer machines
``clock``     wall clocks that jump
``network``   lost packets
``evidence``  state and logs of a failed audit
``task``      the task that counts samples
"""
