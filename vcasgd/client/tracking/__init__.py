"""Export of a job's history to experiment trackers. Each tracker has a module of its own."""

from vcasgd.client.tracking.base import TrackerKind
from vcasgd.client.tracking.points import new_points
from vcasgd.client.tracking.registry import open_tracker, tracker_kind

__all__ = ["TrackerKind", "new_points", "open_tracker", "tracker_kind"]
