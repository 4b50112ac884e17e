"""vcasgd: train PyTorch models on machines that vanish.

The names below are the public interface; everything else may change.
"""

from vcasgd.task import Task

__all__ = ["Task", "__version__"]

__version__ = "0.1.0"
