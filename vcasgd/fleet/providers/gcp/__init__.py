"""Google Compute Engine. Only :mod:`vcasgd.fleet.providers.gcp.provider` imports google.cloud."""
