"""Where machines come from."""

from __future__ import annotations

from vcasgd.fleet.providers.base import Provider
from vcasgd.fleet.providers.registry import configured_pools, make_providers
from vcasgd.settings import Settings

#: the one pool that this machine plays
LOCAL_POOL = "local"


def providers_of(settings: Settings) -> dict[str, Provider]:
    """The provider of each pool, by the pool's name. Raises :class:`~vcasgd.errors.SpecError`."""
    return make_providers(settings, configured_pools(settings))
