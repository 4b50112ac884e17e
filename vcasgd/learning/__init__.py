"""The mathematics of training, pure: tensors in, tensors out.

Nothing here reads a clock, the environment, a file, or a socket, so every line can be tested with
numbers computed by hand and replayed in a simulation. The exception is ``loader_processes``, which
forks processes that load samples ahead.

``vector``     a module's state as one flat vector, and back
``shards``     the vector cut into shards, and the next interval to train
``rules``      update rules: how an update changes the global vector, and its weight by age
``encodings``  payloads of updates: codecs, formats, error feedback
``subtasks``   an epoch's seeded order cut into subtasks, and the applied record
``length``     the plan of a job's subtasks, from its file and facts of the data
``rates``      learning rates over the job's progress, and gradient clipping
``training``   the local loop of a worker
``tuning``     decisions of self-tuning
"""
