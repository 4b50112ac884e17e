"""Base of the models for everything that people write."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Immutable model that rejects unknown fields and infinite or NaN numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
