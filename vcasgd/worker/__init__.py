"""The worker process: lease a subtask, fetch the model, train, push the update.

Entry point: :func:`vcasgd.worker.main.run`, which a Ray actor on each machine calls. A worker keeps
nothing that can't be lost: it can be killed at any line.
"""

#: The function that a Ray actor calls; importing it loads torch.
ENTRY = "vcasgd.worker.main:run"
