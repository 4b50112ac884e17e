"""The parameter server process: claim updates, blend them into the model, publish snapshots.

Run it with ``python -m vcasgd.parameter_server.main``, one beside each tensors server.
"""
