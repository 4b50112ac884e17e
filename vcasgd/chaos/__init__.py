"""The audit: kills on a real stack during a job that counts lost and repeated samples.

``command``   ``vcasgd chaos``
``killers``   faults, with checks that they fired and that the stack recovered
``audit``     the audit
``evidence``  state and logs of a failed audit
``task``      the task that counts samples
"""
