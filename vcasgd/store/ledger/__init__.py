"""The ledger: the small, durable Redis that holds jobs, leases, events, and costs."""
