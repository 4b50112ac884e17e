"""terraform/aws, applied by the real provider to an emulated AWS."""

from __future__ import annotations

import base64
import gzip
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from support.machine_roots import metadata_of
from support.processes import run_program
from support.terraform_harness import REPOSITORY, EmulatedAws, Terraform, emulated_aws, need

from vcasgd.cluster.commands import node_command
from vcasgd.fleet.pools import AwsPoolSpec, parse_pools
from vcasgd.fleet.providers.base import MACHINE_ID, Boot
from vcasgd.fleet.providers.user_data import boot_environment, combined, worker_script
from vcasgd.settings import Settings

#: Largest user data in bytes that EC2 accepts.
MAX_USER_DATA = 16_384
MOTOS_OWN_DISK_GB = 8
#: Hexadecimal digits.
SECRET_LENGTH = 48


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedAws]:
    with emulated_aws(tmp_path_factory.mktemp("aws")) as emulated:
        yield emulated


@pytest.fixture(scope="module")
def before(aws: EmulatedAws) -> dict[str, list[str]]:
    """Inventory before the first apply: moto keeps a snapshot for each image."""
    return _inventory(aws)


@pytest.fixture(scope="module")
def applied(
    aws: EmulatedAws, before: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Terraform:
    need(_aws_command_line(), "the AWS command line, which destroy calls, is not installed")
    directory = tmp_path_factory.mktemp("terraform-aws")
    terraform = Terraform.with_provider(directory, "aws")
    wheel = directory / "vcasgd-0.2.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    settings = {
        "endpoint_url": aws.url,
        "keep_bucket": "false",
        # The emulator has no Data Lifecycle Manager.
        "ledger_backup": "{ days = 0 }",
        "package": str(wheel),
        "zones": '["us-east-1a", "us-east-1b"]',
        "api_cidrs": '["203.0.113.7/32"]',
        # The options that make the machines' user data longest.
        "tls": "true",
        "store": "{ replicas = 1 }",
        "gateway": '{ cidrs = ["0.0.0.0/0"] }',
    }
    variables = {f"TF_VAR_{name}": value for name, value in settings.items()}
    terraform.environment |= {**aws.environment, **variables}
    terraform.init()
    terraform("apply", "-auto-approve", "-no-color")
    return terraform


def _aws_command_line() -> bool:
    try:
        return (
            subprocess.run(["aws", "--version"], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


def _user_data(aws: EmulatedAws, instance: dict[str, Any]) -> dict[str, str]:
    """Return the files that cloud-init will write, by path."""
    answer = aws.client("ec2").describe_instance_attribute(
        InstanceId=instance["InstanceId"], Attribute="userData"
    )
    raw = base64.b64decode(answer["UserData"]["Value"])
    assert len(raw) < MAX_USER_DATA
    return _files(gzip.decompress(raw).decode())


def _files(cloud_config: str) -> dict[str, str]:
    assert cloud_config.startswith("#cloud-config\n")
    rows = yaml.safe_load(cloud_config)["write_files"]
    return {row["path"]: _content(row) for row in rows}


def _content(row: dict[str, str]) -> str:
    if row.get("encoding") == "gz+b64":
        return gzip.decompress(base64.b64decode(row["content"])).decode()
    return row["content"]


def _boot() -> Boot:
    """Return the boot instructions, as the controller requests them."""
    command = node_command(
        address="10.80.0.10:10000",
        machine_id=MACHINE_ID,
        cpus=2,
        temp_dir=None,
        heartbeat=2.0,
        token="t" * 48,
    )
    return Boot(command.argv, {**command.env, "VCASGD_STORAGE_URL": "s3://a-bucket"})


def _named(aws: EmulatedAws, name: str) -> dict[str, Any]:
    (found,) = aws.instances({"Name": "tag:Name", "Values": [name]})
    return found


@pytest.mark.ci
def test_applied_cluster_provides_what_machines_need(applied: Terraform, aws: EmulatedAws) -> None:
    # Given an applied cluster, then the outputs point to it
    outputs = applied.outputs()
    assert outputs["api_url"].startswith("https://")
    assert outputs["token_command"].startswith("aws secretsmanager get-secret-value")
    # And its machines require IMDSv2, and lack the tag of machines that the controller may end
    control, store = _named(aws, "vcasgd-control"), _named(aws, "vcasgd-store-0")
    replica = _named(aws, "vcasgd-replica-0")
    assert outputs["shell_command"].endswith(f"--target {control['InstanceId']}")
    for machine in (control, store, replica):
        assert machine["MetadataOptions"]["HttpTokens"] == "required"
        assert "vcasgd:cluster" not in {tag["Key"] for tag in machine["Tags"]}
    # And they have each other's addresses
    files = _user_data(aws, control)
    assert f"STORE_HOSTS='{store['PrivateIpAddress']}'" in files["/etc/vcasgd/machine.env"]
    ray = f"VCASGD_RAY_ADDRESS={control['PrivateIpAddress']}:10000"
    assert ray in files["/etc/vcasgd/vcasgd.env"]
    for machine in (store, replica):
        files = _user_data(aws, machine)
        assert "VCASGD_NODE=0" in files["/etc/vcasgd/vcasgd.env"]
        assert f"ADDRESS='{machine['PrivateIpAddress']}'" in files["/etc/vcasgd/machine.env"]
    # And a server and its replica reach each other, and their clients both Sentinels
    assert _sources(aws, "vcasgd-store", 6380) == {"control", "store", "worker"}
    assert _sources(aws, "vcasgd-store", 26379) == {"control", "store", "worker"}
    assert _sources(aws, "vcasgd-control", 26379) == {"store", "worker"}


@pytest.mark.ci
def test_gateway_is_the_only_port_for_everyone(applied: Terraform, aws: EmulatedAws) -> None:
    # Given outputs for machines that join
    outputs = applied.outputs()
    (address,) = aws.client("ec2").describe_addresses()["Addresses"]
    assert outputs["join_url"] == f"https://{address['PublicIp']}:8790"
    # Then the control plane has the address, the port is open, and no other one to everyone
    control = _named(aws, "vcasgd-control")
    assert address["InstanceId"] == control["InstanceId"]
    groups = aws.client("ec2").describe_security_groups()["SecurityGroups"]
    open_ports = {
        (each["GroupName"], rule["FromPort"], rule["ToPort"])
        for each in groups
        if each["GroupName"].startswith("vcasgd")
        for rule in each["IpPermissions"]
        if any(network["CidrIp"] == "0.0.0.0/0" for network in rule["IpRanges"])
    }
    assert open_ports == {("vcasgd-control", 8790, 8790)}
    # And the services get settings that they accept
    lines = _user_data(aws, control)["/etc/vcasgd/vcasgd.env"].splitlines()
    settings = Settings.model_validate(
        {
            name.removeprefix("VCASGD_").lower(): value
            for name, _, value in (line.partition("=") for line in lines)
            if name.startswith("VCASGD_")
        }
    )
    assert settings.join_port == 8790
    assert settings.join_url == outputs["join_url"]
    assert settings.join_certificate is not None
    assert settings.api_socket is not None


def _sources(aws: EmulatedAws, group: str, port: int) -> set[str]:
    """Return the roles whose machines may reach a port of a security group's machines."""
    groups = aws.client("ec2").describe_security_groups()["SecurityGroups"]
    names = {each["GroupId"]: each["GroupName"] for each in groups}
    (found,) = (each for each in groups if each["GroupName"] == group)
    return {
        names[pair["GroupId"]].removeprefix("vcasgd-")
        for rule in found["IpPermissions"]
        if rule["FromPort"] <= port <= rule["ToPort"]
        for pair in rule["UserIdGroupPairs"]
    }


@pytest.mark.ci
def test_controller_gets_pools_with_the_created_resources(
    applied: Terraform, aws: EmulatedAws
) -> None:
    # Given the file that the control plane reads as VCASGD_POOLS
    files = _user_data(aws, _named(aws, "vcasgd-control"))
    pool, joining = parse_pools(yaml.safe_load(files["/etc/vcasgd/pools.yaml"]))
    assert isinstance(pool, AwsPoolSpec)
    assert joining.provider == "join"
    # Then its launch template, subnets, and secrets exist
    template = pool.template
    (found,) = aws.client("ec2").describe_launch_template_versions(
        LaunchTemplateId=template.launch_template, Versions=[template.version]
    )["LaunchTemplateVersions"]
    data = found["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["IamInstanceProfile"]["Name"] == "vcasgd-worker"
    subnets = aws.client("ec2").describe_subnets(SubnetIds=list(template.subnets.values()))
    zones = {each["AvailabilityZone"] for each in subnets["Subnets"]}
    assert zones == set(pool.zones) == {"us-east-1a", "us-east-1b"}
    secret = template.secrets["RAY_AUTH_TOKEN"]
    assert aws.client("secretsmanager").describe_secret(SecretId=secret)["Name"] == secret
    # And its machines get a cloud-config with room for what a launch adds
    worker = base64.b64decode(data["UserData"]).decode()
    environment = boot_environment(_boot(), "aws", "us-east-1", template.secrets)
    assert len(combined(worker, worker_script(environment), MAX_USER_DATA)) < MAX_USER_DATA
    assert {
        "/etc/systemd/system/vcasgd-worker.service",
        "/etc/needrestart/conf.d/vcasgd.conf",
    } <= _files(worker).keys()


@pytest.mark.ci
def test_control_plane_generates_the_secrets_and_other_machines_read_them(
    applied: Terraform, aws: EmulatedAws, tmp_path: Path
) -> None:
    # Given secrets without a value
    manager = aws.client("secretsmanager")
    with pytest.raises(manager.exceptions.ResourceNotFoundException):
        manager.get_secret_value(SecretId="vcasgd/servers")
    # When the control plane's script runs twice, and then a store node's
    control = _run_secrets(aws, _user_data(aws, _named(aws, "vcasgd-control")), tmp_path / "c")
    again = _run_secrets(aws, _user_data(aws, _named(aws, "vcasgd-control")), tmp_path / "d")
    store = _run_secrets(aws, _user_data(aws, _named(aws, "vcasgd-store-0")), tmp_path / "s")
    replica = _run_secrets(aws, _user_data(aws, _named(aws, "vcasgd-replica-0")), tmp_path / "r")
    # Then the secrets agree, and token_command prints the same token
    assert control == again
    assert control["VCASGD_LEDGER_URL"] == store["VCASGD_LEDGER_URL"]
    assert control["VCASGD_TENSORS_URL"] == store["VCASGD_TENSORS_URL"]
    # And a replica gets only what it needs
    assert replica == {"VCASGD_TENSORS_URL": control["VCASGD_TENSORS_URL"]}
    assert control["VCASGD_JOB_SECRET"] == store["VCASGD_JOB_SECRET"]
    assert "VCASGD_TOKEN" not in store
    assert _shell(applied.outputs()["token_command"], aws).strip() == control["VCASGD_TOKEN"]


def _shell(command: str, aws: EmulatedAws) -> str:
    done = run_program(command, shell=True, env={**os.environ, **aws.environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_secrets(aws: EmulatedAws, files: dict[str, str], root: Path) -> dict[str, str]:
    """Run the machine's script under another root; return the secrets for the units."""
    for path, content in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        target.chmod(0o755)
    tool = root / "opt/vcasgd/tools/bin/aws"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\nexec aws "$@"\n')
    tool.chmod(0o755)
    (root / "run").mkdir()
    group = _shell("id -gn", aws).strip()
    done = run_program(
        [root / "usr/local/lib/vcasgd/secrets"],
        env={**os.environ, **aws.environment, "VCASGD_ROOT": str(root), "VCASGD_GROUP": group},
    )
    assert done.returncode == 0, done.stderr
    file = root / "run/vcasgd/secrets.env"
    assert file.stat().st_mode & 0o007 == 0
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


@pytest.mark.ci
def test_failed_unit_appears_in_the_tags_of_its_machine(
    applied: Terraform, aws: EmulatedAws, tmp_path: Path
) -> None:
    # Given a machine, and its metadata
    control = _named(aws, "vcasgd-control")
    root = tmp_path / "machine"
    _run_secrets(aws, _user_data(aws, control), root)
    (root / "dev").mkdir()
    with metadata_of(control["InstanceId"]) as url:
        # When systemd reports that it gave up a unit
        environment = {**aws.environment, "VCASGD_ROOT": str(root), "VCASGD_METADATA_URL": url}
        done = run_program(
            [root / "usr/local/lib/vcasgd/unit-failed", "vcasgd-head.service"],
            env={**os.environ, **environment},
        )
    assert done.returncode == 0, done.stderr
    # Then the console and the tag show it
    said = "control-plane: vcasgd-head.service was given up"
    assert said in (root / "dev/console").read_text()
    tags = {tag["Key"]: tag["Value"] for tag in _named(aws, "vcasgd-control")["Tags"]}
    assert tags["vcasgd:boot-error"].startswith(said)
    # And the command in the outputs lists it
    assert said in _shell(applied.outputs()["boot_errors_command"], aws)


@pytest.mark.ci
def test_new_pool_and_new_disk_reach_a_new_control_plane(
    applied: Terraform, aws: EmulatedAws
) -> None:
    # Given a cluster
    old, old_disk = _named(aws, "vcasgd-control"), _ledger_disk(aws)
    # When a pool is added, and the ledger's disk made again, neither of which has an ID before
    pools = '{ aws-spot = {}, other = { machine_types = ["c5.large"] } }'
    applied.environment["TF_VAR_pools"] = pools
    disk = "-replace=module.store.aws_ebs_volume.ledger"
    applied("apply", "-auto-approve", "-no-color", disk)
    # Then a new control plane has both, because a machine reads its user data once
    control = _named(aws, "vcasgd-control")
    assert control["InstanceId"] != old["InstanceId"]
    files = _user_data(aws, control)
    assert _ledger_disk(aws) != old_disk
    assert f"LEDGER_DISK='{_ledger_disk(aws)}'" in files["/etc/vcasgd/machine.env"]
    names = [pool.name for pool in parse_pools(yaml.safe_load(files["/etc/vcasgd/pools.yaml"]))]
    assert names == ["aws-spot", "other", "volunteers"]


def _ledger_disk(aws: EmulatedAws) -> str:
    tag = {"Name": "tag:vcasgd:ledger", "Values": ["vcasgd"]}
    (disk,) = aws.client("ec2").describe_volumes(Filters=[tag])["Volumes"]
    return str(disk["VolumeId"])


@pytest.mark.ci
def test_another_region_is_refused_before_machines_are_forgotten(applied: Terraform) -> None:
    there = ["-var=region=us-west-2", '-var=zones=["us-west-2a", "us-west-2b"]']
    said = applied("plan", "-no-color", *there, expect=1)
    assert "zones: this cluster is in us-east-1a, us-east-1b" in said


@pytest.mark.ci
def test_second_plan_is_empty_and_destroy_leaves_nothing(
    applied: Terraform, aws: EmulatedAws, before: dict[str, list[str]], tmp_path: Path
) -> None:
    # Given a cluster whose control plane has generated its secrets
    secrets = _run_secrets(
        aws, _user_data(aws, _named(aws, "vcasgd-control")), tmp_path / "control"
    )
    # When nothing changed, then a second plan is empty (status 2 means changes)
    ec2 = aws.client("ec2")
    ec2.delete_tags(
        Resources=[_named(aws, "vcasgd-control")["InstanceId"]], Tags=[{"Key": "vcasgd:boot-error"}]
    )
    applied("plan", "-detailed-exitcode", "-no-color", f"-out={tmp_path / 'plan'}", expect=0)
    # And the refreshed state has none of the secrets
    state = zipfile.ZipFile(tmp_path / "plan").read("tfstate").decode()
    assert "vcasgd-control" in state
    for name in ("VCASGD_TOKEN", "VCASGD_RAY_TOKEN", "VCASGD_JOB_SECRET", "VCASGD_SECRETS_KEY"):
        assert len(secrets[name]) == SECRET_LENGTH
        assert secrets[name] not in state
    assert str(urlsplit(secrets["VCASGD_LEDGER_URL"]).password) not in state
    there = _inventory(aws)
    assert there["buckets"]
    assert there["volumes"]
    # Given machines that a controller launched from it, outside Terraform's state
    files = _user_data(aws, _named(aws, "vcasgd-control"))
    pool, *_ = yaml.safe_load(files["/etc/vcasgd/pools.yaml"])["pools"]
    launched = ec2.run_instances(
        LaunchTemplate={"LaunchTemplateId": pool["template"]["launch_template"]},
        SubnetId=pool["template"]["subnets"]["us-east-1b"],
        InstanceType="c5.large",
        MinCount=3,
        MaxCount=3,
        TagSpecifications=[
            {"ResourceType": "instance", "Tags": [{"Key": "vcasgd:cluster", "Value": "vcasgd"}]}
        ],
    )["Instances"]
    assert len(aws.instances()) == 3 + len(launched)
    # When it is destroyed
    said = applied("destroy", "-auto-approve", "-no-color")
    # Then nothing of it is left
    assert all(each["InstanceId"] in said for each in launched)
    assert aws.instances() == []
    assert _inventory(aws) == before


def _inventory(aws: EmulatedAws) -> dict[str, list[str]]:
    """Return all resources that could cost money or block the next apply."""
    ec2, iam = aws.client("ec2"), aws.client("iam")
    found = {
        # moto gives a machine from a template a second disk, and never deletes it.
        "volumes": [
            each["VolumeId"]
            for each in ec2.describe_volumes()["Volumes"]
            if each["Size"] != MOTOS_OWN_DISK_GB
        ],
        "addresses": [each["AllocationId"] for each in ec2.describe_addresses()["Addresses"]],
        "snapshots": [
            each["SnapshotId"] for each in ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
        ],
        "networks": [
            each["VpcId"] for each in ec2.describe_vpcs()["Vpcs"] if not each["IsDefault"]
        ],
        "templates": [
            each["LaunchTemplateId"] for each in ec2.describe_launch_templates()["LaunchTemplates"]
        ],
        "buckets": [each["Name"] for each in aws.client("s3").list_buckets()["Buckets"]],
        "roles": [each["RoleName"] for each in iam.list_roles()["Roles"]],
        "profiles": [
            each["InstanceProfileName"] for each in iam.list_instance_profiles()["InstanceProfiles"]
        ],
        "secrets": [
            each["Name"] for each in aws.client("secretsmanager").list_secrets()["SecretList"]
        ],
    }
    return {kind: sorted(names) for kind, names in found.items()}


def test_terminate_script_fails_without_the_aws_command_line(tmp_path: Path) -> None:
    # Given no AWS command line
    script = REPOSITORY / "infra/fleet/terminate-aws"
    # When the script would terminate the fleet's machines
    done = run_program(["/bin/bash", script, "vcasgd", "us-east-1"], env={"PATH": str(tmp_path)})
    # Then it fails before the machines' network is removed, and names the missing program
    assert done.returncode == 1
    assert "no program aws" in done.stderr
