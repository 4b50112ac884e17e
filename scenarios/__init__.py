"""Scenarios: faults at given times during an audited job, and what they may cost.

Each ``.yaml`` file here is a scenario. ``python -m scenarios FILE.yaml`` runs one.

``scenario``  the file, its schedule, and the expected cost
``run``       the run on a stack of its own
``faults``    frozen processes, slow and full disks, a pool with fewer machines
``clock``     wall clocks that jump
``network``   lost packets
"""
