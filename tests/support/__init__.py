"""Helpers that tests share: servers, stacks, emulated clouds, and waiting."""
