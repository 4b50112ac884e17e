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

# -- servers: what a worker's credentials may cost ----------------------------------------------

#: Bytes of one string; the largest valid one is a chunk of 1 MiB, or the facts of a model.
MAX_STRING_BYTES = 4 << 20
#: Bytes of a command that isn't executed yet. Our clients send less before they read.
MAX_QUERY_BYTES = 64 << 20
#: Bytes of answers that a client hasn't read. The longest are kinds of content of a job, each at
#: its quota, and the server copies this much before it serves others.
MAX_ANSWER_BYTES = 128 << 20
#: Bytes of unread answers that a client may have for :data:`MAX_SLOW_ANSWER_SECONDS`. Four chunks
#: are under way to a reader of models.
MAX_SLOW_ANSWER_BYTES = 32 << 20
#: Seconds, as for the slowest link on which a machine can train.
MAX_SLOW_ANSWER_SECONDS = 60
#: Percentage of a server's memory limit for all connections together: commands and answers. The
#: largest is closed first. The rest is for data.
MAX_CLIENTS_PERCENT = 25
#: Databases of a server. Quotas don't see another one.
MAX_DATABASES = 1
#: Bytes of one kind of content of a job, several times what 10,000 workers and full streams need.
MAX_CONTENT_BYTES = 64 << 20
#: Bytes of the headers that wait in a tensors server: all push slots, with an average of 256 KiB.
MAX_HEADERS_BYTES = 256 << 20
#: Entries of one kind of content of a job: some for each of 10,000 workers.
MAX_ENTRIES = 100_000
#: Requests for pins that a parameter server reads at a time; it keeps four pins.
MAX_PIN_REQUESTS = 16
#: Bytes of a name, such as a worker's or an update's.
MAX_NAME_BYTES = 255
#: Bytes of a number as text.
MAX_NUMBER_BYTES = 32
#: Bytes of a work item's name: its kind and a number.
MAX_WORK_ITEM_BYTES = 64
#: Bytes of a lease's holder: a worker and a number.
MAX_HOLDER_BYTES = MAX_NAME_BYTES + 1 + MAX_NUMBER_BYTES
#: Bytes of a heartbeat; a longer one is not read.
MAX_HEARTBEAT_BYTES = 1 << 16
#: Leases that a worker renews with a heartbeat; it holds about one for each learner.
MAX_RENEWED = 1000
#: Names of metrics that the steps of a job log.
MAX_LOGGED = 64
#: Bytes of a header; a longer one is not parsed.
MAX_HEADER_BYTES = 1 << 20
#: Bytes of what an update's header has of buffers that aren't averaged, in base64.
MAX_INTEGERS_BYTES = MAX_HEADER_BYTES // 2
#: Chunks of 1 MiB of a payload or a snapshot of one shard, which a script looks at one by one.
MAX_CHUNKS = 1 << 17
#: Updates of which a worker asks for the fate at a time.
MAX_ASKED_UPDATES = 10_000
#: Updates that have to be processed before a worker gets a push slot.
MAX_EARLIER_UPDATES = 1000
#: Part of a tensors server's memory limit that the workers of one job may fill beside other jobs.
#: Honest ones need their job's share, which is at most half then.
MAX_SHARE_BESIDE_OTHERS = 0.5

# -- log lines of a job ---------------------------------------------------------------------------

#: Lines that the ledger keeps of a job: the newest.
LOG_LINES_KEPT = 10_000
#: Bytes of a line; a longer one is cut and says so. All lines together stay below
#: :data:`MAX_CONTENT_BYTES`.
LOG_LINE_BYTES = 4000
#: Lines that a worker sends at once, and then per second, so that it leaves room for others.
LOG_BURST_LINES, LOG_LINES_PER_SECOND = 3000, 20.0
#: Characters of a text to search for in lines.
MAX_SEARCHED = 200

# -- secrets and packages -------------------------------------------------------------------------

#: Characters of a token or a secret in the settings: with fewer, it can be guessed.
MIN_SECRET = 16
#: Uploads of packages, each of which is in memory until it is stored, in total and with one token.
MAX_UPLOADS, MAX_UPLOADS_PER_TOKEN = 16, 4
#: Bytes of new packages that a token uploads within a day: 200 of the default size limit.
MAX_UPLOADED_BYTES = 20_000_000_000
#: Files in a package. Their names alone take a second to read from 100,000.
MAX_PACKAGE_FILES = 10_000
