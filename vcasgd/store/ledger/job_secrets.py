"""Secrets of jobs: encrypted in the ledger, and delivered to the job's workers only.

The API encrypts them with the stack's key, which workers don't have. A worker writes a public key
that it has just made, with a proof that the key is its own; the controller decrypts the secrets,
encrypts them for that key, and deletes the request. So the ledger and its files never contain a
value, and only the worker's process has the key to its own copy.
See docs/adr/0022-secrets-and-certificates.md.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from hmac import compare_digest

from vcasgd.encryption import Recipient, StorageCipher, Undecipherable, encrypt_for
from vcasgd.errors import JobUnreadable, StoreUnavailable
from vcasgd.store.acl import address_proof
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.placement import Clearances
from vcasgd.store.ledger.untrusted import worker_name
from vcasgd.store.ledger.workers import JobWorkers

log = logging.getLogger(__name__)

#: Seconds between two reads of an answer.
POLL_SECONDS = 0.1
#: Requests that are answered at once, in less than a tenth of a second.
MAX_ANSWERS = 200


def encrypt_secrets(cipher: StorageCipher, job: str, values: Mapping[str, str]) -> str:
    """Return the encrypted secrets of a job, for the ledger."""
    return cipher.encrypt(json.dumps(dict(values)), job)


class SecretDelivery:
    """Answers the requests of one job's workers, on the platform's side.

    Workers in quarantine, and those that aren't cleared for the job's data, get no answer, also not
    under another worker's name: all workers of a job can write requests, and only the worker itself
    and the platform have its pass, which ``pass_of`` returns for its name.
    """

    def __init__(
        self,
        ledger: RedisClient,
        job: str,
        cipher: StorageCipher | None,
        pass_of: Callable[[str], str],
    ) -> None:
        self._ledger = ledger
        self._job = job
        self._keys = LedgerKeys(job)
        self._cipher = cipher
        self._pass_of = pass_of

    def answer(self) -> None:
        """Answer all requests, for :data:`MAX_ANSWERS` of them in one call.

        Raises :class:`StoreUnavailable`, and :class:`JobUnreadable` if the stack's key is another
        one than at the submission.
        """
        requests = self._requests()
        if not requests:
            return
        text = self._secrets()
        answers = {}
        for name, request in requests.items():
            address, _, proof = request.partition(" ")
            if not compare_digest(proof, address_proof(self._pass_of(name), address)):
                log.warning("%s: another worker asked in the name of %s", self._job, name)
                continue
            try:
                answers[name] = encrypt_for(address, text, f"{self._job}/{name}")
            except ValueError:
                log.warning("%s: worker %s asked with an invalid key", self._job, name)
        with self._ledger.pipeline(transaction=True) as pipe:
            if answers:
                pipe.hset(self._keys.secret_answers, mapping=answers)
            pipe.hdel(self._keys.secret_requests, *requests)
            pipe.execute()

    def _requests(self) -> dict[str, str]:
        """Return the requests in the names of workers that may have the secrets."""
        rows = self._ledger.hgetall(self._keys.secret_requests)
        if not rows:
            return {}
        named = ((worker_name(name), text) for name, text in rows.items())
        found = {name: text.decode("ascii", "ignore") for name, text in named if name is not None}
        excluded = set(JobWorkers(self._ledger).quarantined(self._job))
        excluded |= Clearances(self._ledger).uncleared(self._job, found.keys())
        allowed = sorted(found.keys() - excluded)[:MAX_ANSWERS]
        return {name: found[name] for name in allowed}

    def _secrets(self) -> str:
        stored = self._ledger.get(self._keys.secrets)
        if stored is None:
            return "{}"
        if self._cipher is None:
            raise JobUnreadable("the job has secrets, and VCASGD_SECRETS_KEY is not set")
        try:
            return self._cipher.decrypt(stored.decode(), self._job)
        except Undecipherable as error:
            raise JobUnreadable(f"the job's secrets: {error}") from None


def receive_secrets(
    ledger: RedisClient,
    job: str,
    worker: str,
    lease_pass: str,
    seconds: float,
    on_wait: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Return the secrets of a job, as the worker with a pass; wait for them up to ``seconds``.

    ``on_wait`` is called while it waits. Raises :class:`StoreUnavailable`.
    """
    keys, recipient = LedgerKeys(job), Recipient()
    address = recipient.address
    request = f"{address} {address_proof(lease_pass, address)}"
    ledger.hset(keys.secret_requests, worker, request)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = ledger.hget(keys.secret_answers, worker)
        if answer is not None:
            try:
                values = json.loads(recipient.decrypt(answer.decode(), f"{job}/{worker}"))
            except Undecipherable:
                pass  # The answer to an earlier request of a worker with this name.
            else:
                return {str(name): str(value) for name, value in values.items()}
        on_wait()
        time.sleep(POLL_SECONDS)
    raise StoreUnavailable(f"no controller delivered the job's secrets within {seconds:.0f} s")
