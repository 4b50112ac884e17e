"""Whether the process lives, and whether it can serve."""

from __future__ import annotations

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Response, status

from vcasgd.api.rows import Health
from vcasgd.api.services import Here
from vcasgd.errors import StoreError

router = APIRouter(tags=["health"])

#: who asks wants an answer, not the truth at any price
READY_SECONDS = 2.0
#: a thread that no other request can occupy, and that a silent ledger can't use up
_THREADS = CapacityLimiter(8)


@router.get("/healthz")
async def healthz() -> Health:
    """Always 200 while the process lives."""
    return Health(status="ok")


@router.get(
    "/readyz",
    responses={503: {"model": Health, "description": "Requests would fail; `reasons` say why."}},
)
async def readyz(here: Here, response: Response) -> Health:
    """Whether the ledger answers; asked and answered within two seconds."""
    reason = await _ledger(here)
    if reason is None:
        return Health(status="ok")
    response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return Health(status="unavailable", reasons=[reason])


async def _ledger(here: Here) -> str | None:
    """What is wrong with the ledger. Strangers read this, so it names no address."""
    try:
        with anyio.fail_after(READY_SECONDS):
            await to_thread.run_sync(here.ledger.ping, abandon_on_cancel=True, limiter=_THREADS)
    except TimeoutError:
        return f"the ledger does not answer within {READY_SECONDS:g} s"
    except StoreError as error:
        return f"the ledger: {type(error).__name__}"
    return None
