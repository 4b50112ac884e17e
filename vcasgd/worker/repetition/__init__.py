"""Exact repetition of push intervals: a worker on a machine of one's own repeats a volunteer's.

``state``     what an interval depends on besides its base and its samples, as bytes
``recorder``  the volunteer's side: commits to states, and uploads them when it is asked
``repeater``  the other side: repeats an interval beside its own training
``duty``      one of both sides for a worker's training loop
"""
