"""The two Redis servers and everything that is said to them.

The *ledger* is small and durable: jobs, leases, events. The *tensors* are large and fast:
snapshots and updates. This package is the only importer of redis; library exceptions are
mapped to ours in :mod:`vcasgd.store.connection` and nowhere else. Whatever must happen
together is one Lua script in ``scripts/``.
"""
