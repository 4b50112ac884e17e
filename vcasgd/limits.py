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

# -- The gateway: connections of visitors, and of machines with a token. At a limit, the connection
# -- that has been silent for longest makes room for a new one.

#: Connections that have not authenticated, sent a request, or been closed yet, in all. Each takes
#: about 150 KB for TLS.
MAX_GATEWAY_VISITORS = 1000
#: The same from one address (IPv6: one /64), behind which there may be a campus.
MAX_GATEWAY_VISITORS_OF_ADDRESS = 100
#: Connections that the gateway passes on to the API: well below the 1,024 open files that a process
#: has by default, of which the API needs some for itself.
MAX_GATEWAY_REQUESTS = 400
#: The same from one address. An agent keeps one open, and a browser six.
MAX_GATEWAY_REQUESTS_OF_ADDRESS = 100
#: Connections to the servers with a token, in all, and with one token: a worker has about ten. A
#: server has room for 50,000.
MAX_GATEWAY_GUESTS = 8000
MAX_GATEWAY_GUESTS_OF_TOKEN = 2000
#: Seconds for the TLS handshake; then for the line that names a service, and a server's connection,
#: or for the head of the first request; and to read what is left when a connection is closed.
GATEWAY_HANDSHAKE_TIMEOUT = 10.0
GATEWAY_FIRST_TIMEOUT = 10.0
GATEWAY_CLOSE_TIMEOUT = 5.0
#: Seconds of silence in both directions after which a connection to the API is closed. Streams are
#: never silent for longer than ten, and the API closes idle ones after 75.
GATEWAY_IDLE_TIMEOUT = 90.0
#: Bytes that each side of a connection reads ahead, and has waiting to be sent. Also the longest
#: head of a request.
GATEWAY_BUFFER_BYTES = 1 << 16

# -- connections to the API -----------------------------------------------------------------------

#: Connections at a time. A connection takes some 50 kB, and a file.
MAX_CONNECTIONS = 1024
#: Seconds for the head of a request, from the connection or its first byte. Slow links take 2.
MAX_HEAD_SECONDS = 10.0
#: Seconds for the body of a request, except a package: 30 kB/s for the longest one.
MAX_BODY_SECONDS = 30.0
#: Bytes that a client reads in so many seconds if they are waiting, which is 2 kB/s.
MIN_READ_BYTES, MAX_UNREAD_SECONDS = 65_536, 30.0
#: Bytes that the kernel keeps for a client that reads nothing. It keeps up to 4 MB otherwise.
MAX_UNSENT_BYTES = 131_072
#: Requests in progress, in total and with one token: fewer than the 40 threads that answer them.
MAX_REQUESTS, MAX_REQUESTS_PER_TOKEN = 256, 32
#: Event streams. Each page of the dashboard has one or two.
MAX_STREAMS, MAX_STREAMS_PER_TOKEN = 512, 64
