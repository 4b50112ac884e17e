"""Export of a job's history to experiment trackers. Each tracker has a module of its own."""

from vcasgd.client.tracking.points import new_points, worker_points
from vcasgd.client.tracking.registry import open_tracker, tracker_kind

__all__ = ["new_points", "open_tracker", "tracker_kind", "worker_points"]
