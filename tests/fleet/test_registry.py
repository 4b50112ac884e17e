"""Registry of providers by pool, and errors if one can't be created."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.provider_backends import aws_backend, gcp_backend

from vcasgd.errors import CloudDenied, CloudUnavailable, SpecError
from vcasgd.fleet.pools import parse_pools
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.fleet.providers.registry import configured_pools, make_providers
from vcasgd.settings import Settings


def test_local_pool_follows_the_settings(tmp_path: Path) -> None:
    settings = Settings(
        home=tmp_path,
        local_capacity=7,
        local_price_per_hour=0.1,
        local_on_demand_price_per_hour=0.4,
        local_boot_seconds=1.5,
        local_notice_seconds=9.0,
    )
    providers = make_providers(settings, configured_pools(settings))
    assert providers.keys() == {"local"}
    provider = providers["local"]
    assert isinstance(provider, LocalProvider)
    pool, template = provider.pool, provider.pool.template
    assert pool.max_machines == 7
    assert (template.price_per_hour, template.on_demand_price_per_hour) == (0.1, 0.4)
    assert (template.boot_seconds, template.notice_seconds) == (1.5, 9.0)


def test_local_pools_of_a_file_are_separate(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    template = {"price_per_hour": 0.0, "on_demand_price_per_hour": 2.0}
    pools = [
        {"name": "small", "provider": "local", "max_machines": 1},
        {"name": "large", "provider": "local", "zones": ["x", "y"], "template": template},
    ]
    path.write_text(yaml.safe_dump({"pools": pools}))
    settings = Settings(home=tmp_path, pools=path, local_price_per_hour=0.5, local_capacity=4)
    providers = make_providers(settings, configured_pools(settings))
    assert providers["small"] is not providers["large"]
    assert (providers["small"].capacity("small"), providers["large"].capacity("large")) == (1, 4)
    offers = providers["large"].offers("large")
    assert [(one.zone, one.price_per_hour, one.on_demand_price_per_hour) for one in offers] == [
        ("x", 0.0, 2.0),
        ("y", 0.0, 2.0),
    ]


def test_pools_of_one_place_share_a_provider(tmp_path: Path) -> None:
    with aws_backend() as aws, gcp_backend() as gcp:
        documents = [
            aws.document(name="a"),
            gcp.document(name="g"),
            aws.document(name="b", spot=False, max_machines=3),
        ]
        settings = Settings(home=tmp_path, compute_url=gcp.url)
        providers = make_providers(settings, parse_pools({"pools": documents}))
        assert list(providers) == ["a", "g", "b"]
        assert providers["a"] is providers["b"]
        assert {offer.spot for offer in providers["b"].offers("b")} == {False}
        assert providers["g"].name == "gcp"
        assert providers["a"].machines() == providers["g"].machines() == []


def test_credentials_of_aws_that_come_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with aws_backend() as aws:
        # Given a provider that is made when the machine's credentials can't be read
        with monkeypatch.context() as patch:
            patch.delenv("AWS_ACCESS_KEY_ID")
            patch.delenv("AWS_SECRET_ACCESS_KEY")
            provider = aws.provider()
            with pytest.raises(CloudDenied, match="credentials"):
                provider.machines()
        # When they can, then it uses them
        assert provider.machines() == []


def test_credentials_of_google_are_read_with_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    with gcp_backend() as gcp:
        pools = parse_pools({"pools": [gcp.document()]})
    settings = Settings(home=tmp_path, compute_url="https://127.0.0.1:9")

    # No server of credentials that is slow delays who makes providers.
    (provider,) = make_providers(settings, pools).values()

    with pytest.raises(CloudDenied, match="credentials"):
        provider.machines()
    key = generate_private_key(65537, 2048).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    account = {"type": "service_account", "client_email": "a@b", "private_key": key.decode(),
               "token_uri": "http://127.0.0.1:9"}  # fmt: skip
    file.write_text(json.dumps(account))
    with pytest.raises(CloudUnavailable, match="Connection refused"):
        provider.machines()


@pytest.mark.parametrize(("cloud", "library"), [("aws", "boto3"), ("gcp", "google.cloud")])
def test_a_missing_library_is_named_with_its_remedy(
    cloud: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with aws_backend() as aws, gcp_backend() as gcp:
        document = aws.document() if cloud == "aws" else gcp.document()
    monkeypatch.setitem(sys.modules, library, None)
    prefix = f"vcasgd.fleet.providers.{cloud}"
    for module in [name for name in sys.modules if name.startswith(prefix)]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(SpecError, match=rf"pip install 'vcasgd\[{cloud}\]'"):
        make_providers(Settings(home=tmp_path), parse_pools({"pools": [document]}))
