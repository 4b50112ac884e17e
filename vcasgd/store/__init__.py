"""The two Redis servers, and all communication with them.

The *ledger* is small and durable: jobs, leases, events. The *tensors servers* are large and fast:
snapshots and updates. This package is the only importer of redis. Exceptions of the library are
translated in :mod:`vcasgd.store.pipeline` and nowhere else. Each change that must be atomic is
one Lua script in ``scripts/``.
"""
