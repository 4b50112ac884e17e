"""Exact repetition of push intervals: a worker on a machine of one's own repeats a volunteer's.

``state``     what an interval depends on besides its base and its samples, as bytes
``duty``      the part of a worker in repetitions, which its training loop calls
``recorder``  the volunteer's duty: commits to states, and uploads them when it is asked
``verifier``  the other duty: compares updates and states with the right ones
``repeater``  repeats an interval beside a learner's own training
"""
