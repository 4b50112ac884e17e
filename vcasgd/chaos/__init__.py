"""Fault injection on a real stack, and the audit that counts lost and repeated samples.

``command``   ``vcasgd chaos``
``plan``      random plan of kills
``killers``   faults, with checks that they fired and that the stack recovered
``audit``     the audit
``evidence``  state and logs of a failed audit
``task``      the task that counts samples
"""
