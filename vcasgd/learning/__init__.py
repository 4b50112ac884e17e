"""The mathematics of training, pure: tensors in, tensors out.

Nothing here reads a clock, the environment, a file or a socket, so that every line can be
tested with hand-computed numbers and replayed in a simulation.

``vector``     a module's state as one flat vector, and back
``rules``      update rules: how an update changes the global vector
``staleness``  s(τ): how an update loses weight with its age
``codecs``     how numbers are encoded for the wire
``encoding``   an update on the wire: parameters, statistics, and what an encoding loses
``subtasks``   an epoch's seeded order cut into subtasks, and the record of what is applied
``rates``      learning rates over the job's progress, and clipped gradients
``training``   the local loop of a worker
"""
