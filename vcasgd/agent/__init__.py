"""The agent: joins a stack elsewhere with this machine, and runs the workers that it is given.

It reaches the stack by one TLS port (:mod:`vcasgd.gateway`). Its workers run the same process as
those of other machines, and reach the servers by Unix sockets of the agent.
"""
