"""The job specification: strict models for ``job.yaml`` and for ``POST /api/v1/jobs``."""
