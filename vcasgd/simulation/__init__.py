"""Simulation of a job: the product's learners and rules on simulated machines and time."""
