"""The tensors server: the large, fast Redis that holds snapshots and updates."""
