"""The parameter server process, one beside each tensors server.

It claims updates, blends them into the model, and publishes snapshots. Run it with
``python -m vcasgd.parameter_server.main``.
"""
