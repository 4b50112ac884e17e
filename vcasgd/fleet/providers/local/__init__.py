"""Local machines: processes of this computer that boot, get eviction notices, and vanish."""
