"""Data in the tensors server, the large, fast Redis: snapshots and updates."""
