"""Faults on purpose: killers, traces of real evictions, and the audit that proves the promise."""
