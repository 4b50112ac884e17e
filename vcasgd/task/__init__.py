"""The user's code: the ``Task`` class and the package that carries it to workers."""
