"""The code on a machine: its first process in a cloud, and the processes of its workers."""
