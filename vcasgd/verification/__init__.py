"""Verification of volunteers: judges what their machines send, and repeats a part of it exactly.

The core has a hook for each side, :mod:`vcasgd.parameter_server.verification` and
:mod:`vcasgd.worker.verification`, and works without this package.

``server``       the parameter server's side: who sent an update, and what becomes of its owner
``screening``    compares owners over many updates
``repetitions``  chooses updates that are repeated, and follows them to a result
``judge``        what differences of repeated updates show
``exchange``     requests, states, tasks, and results on the tensors server
``recorder``     the volunteer's worker: commits to its states, and uploads them when it is asked
``verifier``     a worker on a machine of the cluster: repeats intervals beside its own training
``state``        what an interval depends on besides its base and its samples
"""
