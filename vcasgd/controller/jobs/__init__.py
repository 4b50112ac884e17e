"""The job loop: starts, checkpoints, tunes, and ends jobs. It knows nothing of machines."""
