"""The gateway: one TLS port through which machines elsewhere reach the API and the servers.

A connection that names no protocol of vcasgd in its TLS handshake (ALPN) goes to the API. Others
begin with one line, ``service token``, and go to that service if the token may join. So nothing of
the Redis protocol is reachable without a token.
"""
