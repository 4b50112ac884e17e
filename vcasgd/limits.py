"""Limits on what a visitor, a holder of a token, or a worker may cost the platform.

One table for all of them, so that a reader sees what each may cost, and the fuzzer draws values
at, just below, and far above each. The section "Limits" of ``docs/security.md`` names for each
limit where it is enforced and the test that attacks it.
"""
