"""The fleet loop: observe machines, decide with :func:`vcasgd.fleet.plan.decide`, act."""
