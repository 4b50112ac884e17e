"""The product measured on real processes: what the exchange of updates costs, and what bounds it.

``command``   ``vcasgd bench``
``store``     one measurement of the store, from the first process to the last
``rig``       its processes, and the only place that knows how they are connected
``worker``    a worker of ours whose learner has nothing to learn
``tally``     what such a worker counts, in memory that it shares with whoever measures
``gauges``    resident memory and processor time of processes
``loopback``  what the machine itself can move between two processes
``codecs``    what the encodings of updates cost, without any process around them
``copies``    how often the bytes of an update are copied, by name
``figures``   the numbers that are printed
"""
