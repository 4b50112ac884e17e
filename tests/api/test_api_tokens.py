"""API tokens against a real API and a real ledger: scopes, owners, revocation, secrecy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.api_harness import Api, filled, messages_of, operations, spec, zipped
from support.waiting import PATIENCE, await_truth

from vcasgd.api.callers import COOKIE, SignIns
from vcasgd.client import Client
from vcasgd.errors import Conflict, Forbidden, NotFound, SpecError, Unauthorized
from vcasgd.spec.access import Scope
from vcasgd.store import keys
from vcasgd.store.ledger.api_tokens import MAX_TOKENS, ApiToken, ApiTokens
from vcasgd.store.ledger.costs import Booking, Costs
from vcasgd.task.package import digest_of

PAGE = {"X-Vcasgd-Request": "dashboard"}


#: Routes that a token with scope join can't use: all others.
JOIN_REFUSED = 43


def pool_for(scope: Scope) -> str | None:
    return "volunteers" if scope is Scope.JOIN else None


@contextmanager
def user(api: Api, name: str, scope: str, **options: Any) -> Iterator[Client]:
    with api.client() as admin:
        created = admin.create_token(name, scope, **options)
    with Client(api.url, created.token, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize("scope", list(Scope))
def test_each_route_refuses_lower_scopes_and_names_the_one_it_needs(
    api: Api, client: Client, scope: Scope
) -> None:
    text = client.create_token("ann", scope, pool=pool_for(scope)).token
    refused = 0
    with api.http(text) as http:
        for method, path, operation in operations(http):
            # The stream has no end; it is tested below.
            if not operation.get("security") or path.endswith("/stream"):
                continue
            needed = Scope(operation["security"][0]["token"][0])
            answer = http.request(method, f"{api.url}{filled(path)}")
            if scope.includes(needed):
                assert answer.status_code not in (401, 403), (method, path)
            else:
                assert answer.status_code == 403, (method, path)
                refused += 1
                if method == "head":
                    continue
                assert f"scope {needed}" in answer.json()["detail"]
                assert f"--scope {needed}" in answer.json()["remedy"]

    allowed = {Scope.READ: 17, Scope.SUBMIT: 10, Scope.ADMIN: 4, Scope.JOIN: JOIN_REFUSED}
    assert refused == allowed[scope]


def test_a_user_changes_its_own_jobs_only(api: Api, client: Client) -> None:
    package = zipped()
    with user(api, "ann", "submit") as ann, user(api, "bob", "submit") as bob:
        own, other = ann.submit(spec(), package), bob.submit(spec(), package)
        before = client.submit(spec(), package)
        assert (own.owner, other.owner, before.owner) == ("ann", "bob", "bootstrap")
        assert [job.owner for job in bob.jobs()] == ["bootstrap", "bob", "ann"]
        for job in (other, before):
            api.start_job(job.id)
            seen = ann.job(job.id)
            for command in (seen.pause, seen.resume, seen.cancel, seen.delete):
                with pytest.raises(Forbidden, match=f"{job.id} belongs to {job.owner}, not to ann"):
                    command()
            assert api.jobs.get(job.id).state == "running"
        api.start_job(own.id)
        assert own.pause().state == "paused"
        assert own.resume().state == "running"
        assert own.cancel().state == "cancelled"
        own.delete()
        with pytest.raises(NotFound):
            ann.job(own.id)
        # A job without an owner belongs to admins.
        nobodys = api.submit()
        assert client.job(nobodys).owner is None
        with pytest.raises(Forbidden, match="belongs to nobody"):
            ann.job(nobodys).cancel()
    for job in (other.id, nobodys):
        assert client.job(job).cancel().state == "cancelled"


def test_an_idempotency_key_is_its_users_own(api: Api) -> None:
    package = zipped()
    with user(api, "ann", "submit") as ann, user(api, "bob", "submit") as bob:
        first = ann.submit(spec(), package, "key")
        second = bob.submit(spec(name="other"), package, "key")
        assert ann.submit(spec(), package, "key").id == first.id

    assert (first.owner, second.owner) == ("ann", "bob")


def test_a_caller_sees_itself(api: Api, client: Client) -> None:
    assert (client.me().name, client.me().scope) == ("bootstrap", "admin")
    with user(api, "ann", "submit", max_machines=4, expires="30d") as ann:
        me = ann.me()
        job = ann.submit(spec(), zipped()).id
    assert (me.name, me.scope, me.max_machines) == ("ann", "submit", 4)
    assert (api.jobs.get(job).owner, api.jobs.get(job).owner_limit) == ("ann", 4)


def test_tokens_are_listed_with_their_use_and_without_their_secret(
    api: Api, client: Client
) -> None:
    text = client.create_token("ann", "submit", max_machines=3, expires="30d").token
    client.create_token("bob", "read")
    with Client(api.url, text) as ann:
        ann.me()

    first, second = client.tokens()

    assert (first.name, first.scope, first.max_machines) == ("ann", "submit", 3)
    assert first.expires_at == pytest.approx(first.created_at + 30 * 86400)
    assert first.last_used_at >= first.created_at - 1
    assert (second.name, second.last_used_at, second.expires_at) == ("bob", None, None)
    with api.http() as http:
        assert text not in http.get("tokens").text


def test_a_token_has_a_monthly_budget_and_shows_what_it_spent(api: Api, client: Client) -> None:
    with user(api, "ann", "submit", max_usd_per_month=12.5) as ann:
        assert ann.me().max_usd_per_month == 12.5
        job = ann.submit(spec(), zipped()).id
    amounts = {"east|spot|working|usd": 1.25, "east|spot|working|seconds": 9.0}
    assert Costs(api.connection).book([Booking("m-1", None, "{}", job, amounts)]) == [True]

    (token,) = client.tokens()
    assert (token.month_usd, token.max_usd_per_month) == (1.25, 12.5)
    assert client.spend().month_usd == 1.25
    with pytest.raises(SpecError, match="max_usd_per_month"):
        client.create_token("bob", "submit", max_usd_per_month=-1.0)


def test_a_revoked_token_stops_working(api: Api, client: Client) -> None:
    with user(api, "ann", "submit") as ann:
        job = ann.submit(spec(), zipped()).id
        client.revoke_token("ann")
        with pytest.raises(Unauthorized):
            ann.me()
        with user(api, "ann", "read") as successor:
            assert successor.me().scope == "read"
            with pytest.raises(Unauthorized):
                ann.me()
    assert client.job(job).state == "starting", "the job goes on"
    with pytest.raises(NotFound, match="there is no token eve"):
        client.revoke_token("eve")


def test_a_token_that_another_api_revoked_stops_working(api: Api) -> None:
    with user(api, "ann", "read") as ann, api.http() as http:
        ann.me()
        ApiTokens(api.connection).revoke("ann")
        await_truth(lambda: refused(ann))
        assert http.get("me").status_code == 200


def refused(client: Client) -> bool:
    try:
        client.me()
    except Unauthorized:
        return True
    return False


def test_an_expired_token_stops_working_and_says_so(api: Api, client: Client) -> None:
    with user(api, "ann", "read", expires=1) as ann:
        await_truth(lambda: refused(ann))
        with pytest.raises(Unauthorized, match="the token ann has expired"):
            ann.me()
    (listed,) = client.tokens()
    assert listed.expired
    with pytest.raises(Conflict, match="there is a token ann already"):
        client.create_token("ann", "read")


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_open_streams_end_with_their_token(api: Api, client: Client, end: str) -> None:
    job = api.submit()
    text = client.create_token("ann", "read").token
    paths = ("stream", f"jobs/{job}/events", f"jobs/{job}/logs")
    opened, ended = [threading.Event() for _ in paths], []

    def follow(path: str, is_open: threading.Event) -> None:
        headers = {"Accept": "text/event-stream"}
        with api.http(text) as http, http.stream("GET", path, headers=headers) as response:
            assert response.status_code == 200
            is_open.set()
            ended.append((path, sum(1 for _ in messages_of(response))))

    threads = [
        threading.Thread(target=follow, args=pair, daemon=True)
        for pair in zip(paths, opened, strict=True)
    ]
    for thread in threads:
        thread.start()
    for each in opened:
        assert each.wait(PATIENCE)
    assert ended == []
    if end == "revoked":
        client.revoke_token("ann")
    else:
        token = ApiTokens(api.connection).all()["ann"]
        soon = token.model_copy(update={"expires_at": time.time() + 0.5})
        api.connection.hset(keys.API_TOKENS, "ann", soon.model_dump_json())
    for thread in threads:
        thread.join(PATIENCE)

    assert {path for path, _ in ended} == set(paths)
    assert not api.jobs.get(job).state.over, "the streams did not end with the job"


def test_a_sign_in_is_its_tokens(api: Api, client: Client) -> None:
    job = api.submit()
    text = client.create_token("ann", "read").token
    with api.visitor() as ann:
        assert ann.post("sign-in", json={"token": text}).status_code == 204
        assert text not in str(ann.cookies)
        assert ann.get("me").json()["name"] == "ann"
        answer = ann.post(f"jobs/{job}/cancel", headers=PAGE)
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:vcasgd:problem:forbidden")
        assert "scope submit" in answer.json()["detail"]
        client.revoke_token("ann")
        answer = ann.get("jobs")
        assert (answer.status_code, answer.json()["detail"]) == (401, "the token ann was revoked")
        client.create_token("ann", "admin")
        assert ann.get("jobs").status_code == 401, "the sign-in of an earlier token"


def test_a_sign_in_cannot_be_made_for_another_user(api: Api, client: Client) -> None:
    text = client.create_token("ann", "read").token
    client.create_token("bob", "admin")
    with api.visitor() as ann:
        cookie = ann.post("sign-in", json={"token": text}).cookies[COOKIE]
    # Given the content of others, which she can guess, and her own signature
    sign_ins, bob = SignIns("a secret of eve"), ApiTokens(api.connection).all()["bob"]
    for other in (sign_ins.new(bob), sign_ins.new()):
        forged = ".".join([other.partition(".")[0], cookie.partition(".")[2]])
        assert forged != cookie
        with api.visitor() as eve:
            for sent, status in ((cookie, 200), (forged, 401)):
                answer = eve.get("me", headers={"Cookie": f"{COOKIE}={sent}"})
                assert answer.status_code == status


def test_the_number_of_tokens_is_bounded(api: Api, client: Client) -> None:
    row = ApiToken(name="x", scope=Scope.READ, digest="0", created_at=0.0).model_dump_json()
    api.connection.hset(keys.API_TOKENS, mapping={f"t-{n}": row for n in range(MAX_TOKENS)})

    with pytest.raises(Conflict, match=f"there are {MAX_TOKENS} tokens"):
        client.create_token("ann", "read")

    client.revoke_token("t-0")
    client.create_token("ann", "read")


def test_a_stored_token_that_cannot_be_read_disables_no_other(api: Api, client: Client) -> None:
    with user(api, "ann", "read") as ann:
        api.connection.hset(keys.API_TOKENS, mapping={"bob": "{", "eve": '{"scope": "root"}'})
        client.create_token("zoe", "read")  # the API reads all again
        assert ann.me().name == "ann"
    assert [token.name for token in client.tokens()] == ["ann", "zoe"]


def test_the_secret_is_nowhere_but_in_one_response(own_api: Api) -> None:
    with own_api.client() as client:
        created = client.create_token("ann", "submit")
        with Client(own_api.url, created.token) as ann:
            ann.submit(spec(), zipped())
            texts = [repr(ann), repr(created), str(created), repr(client.tokens())]
    secret = created.token.rpartition("_")[2].encode()
    files = [path for path in own_api.home.rglob("*") if path.is_file()]
    stored = {path: path.read_bytes() for path in files}

    assert any(b"api-tokens" in content for content in stored.values()), "the ledger was written"
    assert b"ann" in own_api.log.read_bytes()
    assert [path for path, content in stored.items() if secret in content] == []
    assert not any(secret.decode() in text for text in texts)


def test_named_tokens_need_the_ledger(own_api: Api) -> None:
    with user(own_api, "ann", "admin") as ann, own_api.client() as client:
        ann.me()
        own_api.ledger.kill()
        statuses = set()
        with own_api.http(ann._api._http.headers["Authorization"].split()[1]) as http:
            while 503 not in statuses:
                statuses.add(http.get("me").status_code)
        assert statuses <= {200, 503}, "never 401, which would end a client for good"
        assert client.me().name == "bootstrap"


def test_a_package_of_another_user_can_be_used_but_not_replaced(api: Api) -> None:
    package = zipped()
    with user(api, "ann", "submit") as ann, user(api, "bob", "submit") as bob:
        ann.upload(package)
        assert bob.submit(spec(), package).owner == "bob"
        with api.http(bob._api._http.headers["Authorization"].split()[1]) as http:
            answer = http.put(f"packages/{digest_of(package)}", content=zipped())
    assert answer.status_code == 422


def test_a_token_for_a_pool_that_no_machine_can_join_is_refused(api: Api, client: Client) -> None:
    providers = {"attic": "join", "hpc": "slurm", "local": "local"}
    api.control.publish({}, {name: {"provider": each} for name, each in providers.items()})

    client.create_token("hpc", "join", pool="hpc")
    for pool, why in (
        ("nopool", "there is no pool nopool"),
        ("local", "machines can't join local"),
    ):
        with pytest.raises(SpecError, match=why) as caught:
            client.create_token("ann", "join", pool=pool)
        assert caught.value.remedy == "choose from attic, hpc"
