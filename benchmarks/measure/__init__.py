"""Measurements of the product on real processes: ``python -m benchmarks.measure``.

``store``       one measurement of the store
``rig``         the processes of a measurement and their connections
``worker``      a product worker whose learner does no work
``tally``       counters of such a worker, in shared memory
``gauges``      resident memory and processor time of processes
``loopback``    throughput of a plain TCP stream on this machine
``codecs``      cost of the encodings of updates, in one process
``data``        waiting time of a worker for its data
``figures``     the results of a measurement
"""
