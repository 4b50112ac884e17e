"""The worker process: lease, fetch, train, push.

Entry point: :func:`vcasgd.worker.main.run`, called by a Ray actor on each machine. A worker keeps
nothing that can't be lost: it can be killed at any line.
"""
