"""The code that runs on a cloud machine: boot command, metadata, secrets, and eviction notices."""
