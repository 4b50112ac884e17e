"""Measurement of the control plane with many simulated workers.

``measure``     starts the processes, asks the API, and collects the figures
``controller``  process: the product's controller on a simulated cloud and cluster
``cloud``       the simulated cloud and cluster
``workers``     process: simulated workers, which use the product's leases and updates

Ledger, tensors server, parameter server and API are the product's own processes. What is not
measured: Ray, whose head has its own limits, and the clouds.
"""
