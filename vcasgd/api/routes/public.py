"""Routes that everyone may use, without a token, if the cluster has a public page."""

from __future__ import annotations

from fastapi import APIRouter, Response

from vcasgd.api.dependencies import PublicPageDep, SettingsDep
from vcasgd.api.problems import documented
from vcasgd.api.public import FRESH_SECONDS
from vcasgd.errors import NotFound
from vcasgd.schemas.public import VolunteersView

router = APIRouter(prefix="/public", tags=["public"])


@router.get("/volunteers", responses=documented(404, 500, 503))
async def list_volunteers(
    settings: SettingsDep, page: PublicPageDep, response: Response
) -> VolunteersView:
    """Show the public jobs and who contributed to them. It needs no token. The status is 404
    unless the cluster has a public page."""
    if not settings.public_page:
        raise NotFound(
            "this cluster has no public page for volunteers",
            remedy="its administrator can set VCASGD_PUBLIC_PAGE=true",
            status=404,
        )
    view = await page.volunteers()
    response.headers["Cache-Control"] = f"public, max-age={FRESH_SECONDS:g}"
    return view
