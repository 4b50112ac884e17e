"""Limits on what a visitor, a holder of a token, or a worker may cost the platform.

One table for all of them, so that a reader sees what each may cost, and the fuzzer draws values
at, just below, and far above each. The section "Limits" of ``docs/security.md`` names for each
limit where it is enforced and the test that attacks it.
"""

# -- what people write: job files, pools files, JSON bodies ---------------------------------------

#: Bytes of a YAML file. The largest known pools file has 20 kB.
MAX_YAML_BYTES = 1_000_000
#: Characters of a text, such as a job file in a request. Real ones have some dozens of lines.
MAX_TEXT = 100_000
#: Levels of nested lists and mappings. A job has five; pydantic and json fail at some hundred.
MAX_DEPTH = 32
#: Values and keys in one file or body: 30 ms of a processor.
MAX_VALUES = 10_000
#: Characters of a number. The largest that a field can take has 20.
MAX_DIGITS = 100
#: Bytes of a request's body: more than the longest job file, with every character escaped.
MAX_BODY_BYTES = 1_000_000
#: Bytes of a body that anyone can send, without a token.
MAX_PUBLIC_BODY_BYTES = 16_000
