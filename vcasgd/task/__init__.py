"""User code: the ``Task`` class and the package that brings it to workers."""
