"""Machines: where they come from, when they go, and how many are wanted."""
