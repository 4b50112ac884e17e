"""The loops that train: worker, parameter server and controller, and the cluster they run on.

Each can be killed at any line; whatever must outlive a process is in one of the two Redis
servers or in object storage. Ray places the workers and nothing else: tensors and control
data never travel through it.
"""
