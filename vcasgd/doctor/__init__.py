"""Diagnosis of an installation: ``vcasgd doctor``.

``facts``    what there is to know, as plain data
``collect``  reads it from this machine, its settings, and the API
``checks``   finds what is wrong in it; pure
"""

from vcasgd.doctor.checks import Finding, findings
from vcasgd.doctor.collect import collect
from vcasgd.doctor.facts import Facts

__all__ = ["Facts", "Finding", "collect", "findings"]
