"""Rules of the clouds for names and texts, which emulators and providers of Terraform don't check.

From the service models of botocore where these state a rule, and else from the vendors' references.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

import botocore.session


class Rule(NamedTuple):
    """A pattern of the whole text, and its limit of characters."""

    pattern: str
    max_length: int

    def allows(self, text: str) -> bool:
        return (
            len(text) <= self.max_length and re.fullmatch(self.pattern, text, re.DOTALL) is not None
        )


def _aws(service: str, operation: str, member: str, *, otherwise: Rule | None = None) -> Rule:
    """Return the rule of a member of a request; ``otherwise`` limits it further."""
    model = botocore.session.get_session().get_service_model(service)
    shape = model.operation_model(operation).input_shape
    assert shape is not None
    stated = shape.members[member].metadata
    pattern, length = stated.get("pattern", ".*"), stated.get("max", 2**20)
    if otherwise is None:
        assert "pattern" in stated or "max" in stated, f"{service} states no rule for {member}"
        return Rule(pattern, length)
    both = f"(?={otherwise.pattern}$){pattern}"
    return Rule(both, min(length, otherwise.max_length))


#: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateSecurityGroup.html
_GROUP_TEXT = Rule(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]*", 255)
_ELASTICACHE_NAME = Rule(r"[a-z](?!.*--)[a-z0-9-]*[a-z0-9]", 40)
#: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html
_TAG = Rule(r"[\w\s.:/=+\-@]*", 256)
#: https://cloud.google.com/compute/docs/naming-resources
_GOOGLE_NAME = Rule(r"[a-z]([-a-z0-9]*[a-z0-9])?", 63)
#: https://cloud.google.com/compute/docs/labeling-resources
_LABEL = Rule(r"[a-z0-9_-]*", 63)
_TITLE = Rule(r".*", 100)

#: By patterns of resources and attributes.
TERRAFORM: Mapping[tuple[str, str], Rule] = {
    ("aws_dlm_lifecycle_policy", "description"): _aws(
        "dlm", "CreateLifecyclePolicy", "Description"
    ),
    ("aws_dlm_lifecycle_policy", "policy_details.schedule.name"): Rule(r"[0-9A-Za-z _-]+", 120),
    ("aws_elasticache_parameter_group", "name"): Rule(_ELASTICACHE_NAME.pattern, 255),
    ("aws_elasticache_parameter_group", "description"): Rule(r"[ -~]*", 255),
    ("aws_elasticache_replication_group", "replication_group_id"): _ELASTICACHE_NAME,
    ("aws_elasticache_replication_group", "description"): Rule(r"[ -~]+", 255),
    ("aws_elasticache_subnet_group", "name"): Rule(_ELASTICACHE_NAME.pattern, 255),
    ("aws_iam_instance_profile", "name"): _aws(
        "iam", "CreateInstanceProfile", "InstanceProfileName"
    ),
    ("aws_iam_role", "name"): _aws("iam", "CreateRole", "RoleName"),
    ("aws_iam_role", "description"): _aws("iam", "CreateRole", "Description"),
    ("aws_iam_role_policy", "name"): _aws("iam", "PutRolePolicy", "PolicyName"),
    ("aws_launch_template", "name"): Rule(r"[a-zA-Z0-9().\-/_]{3,}", 128),
    ("aws_launch_template", "description"): Rule(r".*", 255),
    ("aws_s3_bucket", "bucket"): Rule(
        r"(?!xn--|sthree-|amzn-s3-demo-)[a-z0-9][a-z0-9.-]+[a-z0-9]", 63
    ),
    ("aws_secretsmanager_secret", "name"): _aws(
        "secretsmanager", "CreateSecret", "Name", otherwise=Rule(r"[A-Za-z0-9/_+=.@-]+", 512)
    ),
    ("aws_secretsmanager_secret", "description"): _aws(
        "secretsmanager", "CreateSecret", "Description"
    ),
    ("aws_security_group", "name"): Rule(r"(?!sg-)" + _GROUP_TEXT.pattern, 255),
    ("aws_security_group", "description"): _GROUP_TEXT,
    ("aws_vpc_security_group_*", "description"): _GROUP_TEXT,
    ("google_compute_*", "name"): _GOOGLE_NAME,
    ("google_compute_*", "description"): Rule(r".*", 2048),
    ("google_compute_region_instance_template", "name_prefix"): Rule(r"[a-z][-a-z0-9]*", 54),
    ("google_project_iam_custom_role", "role_id"): Rule(r"[a-zA-Z0-9_.]{3,}", 64),
    ("google_project_iam_custom_role", "title"): _TITLE,
    ("google_project_iam_member", "condition.title"): _TITLE,
    ("google_redis_instance", "name"): Rule(_GOOGLE_NAME.pattern, 40),
    ("google_redis_instance", "display_name"): Rule(r".*", 80),
    ("google_secret_manager_secret", "secret_id"): Rule(r"[A-Za-z0-9_-]+", 255),
    ("google_service_account", "account_id"): Rule(r"[a-z][-a-z0-9]{4,}[a-z0-9]", 30),
    ("google_service_account", "display_name"): _TITLE,
    ("google_storage_bucket", "name"): Rule(
        r"(?!goog)(?!.*google)[a-z0-9][a-z0-9._-]+[a-z0-9]", 63
    ),
    ("google_storage_bucket_iam_member", "condition.title"): _TITLE,
}
#: Attributes that name or describe what a resource makes; each needs a rule.
_TEXTS = re.compile(
    r"(.*\.)?(name|name_prefix|bucket|title|display_name|description|account_id|role_id|secret_id"
    r"|replication_group_id)"
)
#: Attributes with such names that refer to another resource.
_REFERENCES = {
    ("aws_elasticache_parameter_group", "parameter.name"),
    ("aws_launch_template", "iam_instance_profile.name"),
    ("aws_s3_*", "bucket"),
    ("google_storage_bucket_iam_member", "bucket"),
    ("google_secret_manager_secret_iam_member", "secret_id"),
}
#: Largest user data in bytes, of EC2 and in a value of Google's metadata.
_USER_DATA = {"aws": 16_384, "google": 262_144}


def violations(kind: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a cloud would refuse in the planned values of a resource of Terraform."""
    for path, text in _strings(values):
        if ".tags." in f".{path}" or path.startswith("tags_all"):
            continue
        if "labels." in path:
            if not _LABEL.allows(text):
                yield f"{kind}.{path}: {text!r}"
        elif rule := _rule(kind, path):
            if not rule.allows(text):
                yield f"{kind}.{path}: {text!r}"
        elif _TEXTS.fullmatch(path) and not _refers(kind, path):
            yield f"{kind}.{path}: no rule for {text!r}"
    yield from _tags(kind, values)
    yield from _user_data(kind, values)


def _refers(kind: str, path: str) -> bool:
    """Return whether an attribute names another resource."""
    return any(path == name and fnmatch(kind, kinds) for kinds, name in _REFERENCES)


def _rule(kind: str, path: str) -> Rule | None:
    found = (
        rule for (kinds, name), rule in TERRAFORM.items() if name == path and fnmatch(kind, kinds)
    )
    return next(found, None)


def _strings(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _strings(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each, path)


def _tags(kind: str, values: Mapping[str, Any]) -> Iterator[str]:
    for name, text in (values.get("tags") or {}).items():
        if not _TAG.allows(text) or not Rule(_TAG.pattern, 128).allows(name):
            yield f"{kind}.tags.{name}: {text!r}"


def _user_data(kind: str, values: Mapping[str, Any]) -> Iterator[str]:
    cloud = kind.partition("_")[0]
    encoded = values.get("user_data_base64") or values.get("user_data")
    text = (values.get("metadata") or {}).get("user-data") or ""
    size = len(base64.b64decode(encoded)) if encoded else len(text.encode())
    if size > _USER_DATA.get(cloud, size):
        yield f"{kind}: {size} bytes of user data"


#: Members of EC2's requests, whose model states no rules.
#: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateFleet.html
_EC2: Mapping[str, Rule] = {
    "ClientToken": Rule(r"[!-~]*", 64),
    "Key": Rule(_TAG.pattern, 128),
    "Value": _TAG,
    "MaxPrice": Rule(r"\d+(\.\d+)?", 20),
    "LaunchTemplateName": Rule(r"[a-zA-Z0-9().\-/_]{3,}", 128),
}
#: Parts of Google's resources.
#: https://cloud.google.com/compute/docs/reference/rest/v1/instances/bulkInsert
_GOOGLE_REQUEST_ID = Rule(r"(?!0{8}-)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", 36)


def check_aws_request(params: Mapping[str, Any], **_: object) -> None:
    """Fail if EC2 would refuse a request: a handler of botocore's ``before-parameter-build``."""
    for path, text in _strings(params):
        rule = _EC2.get(path.rpartition(".")[2])
        assert rule is None or rule.allows(text), f"EC2 refuses {path}: {text!r}"
    for each in params.get("LaunchTemplateConfigs", ()):
        assert len(each["Overrides"]) <= 300
    assert len(params.get("Filters", ())) <= 50


def google_refusals(request_id: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield what Compute Engine would refuse in a ``BulkInsertInstanceResource``."""
    if not _GOOGLE_REQUEST_ID.allows(request_id):
        yield f"requestId: {request_id!r}"
    properties = body.get("instanceProperties", {})
    yield from (
        f"name: {name!r}" for name in body["perInstanceProperties"] if not _GOOGLE_NAME.allows(name)
    )
    for name, text in properties.get("labels", {}).items():
        if not _LABEL.allows(text) or not Rule(r"[a-z][a-z0-9_-]*", 63).allows(name):
            yield f"labels.{name}: {text!r}"
    for item in properties.get("metadata", {}).get("items", ()):
        if len(item["value"].encode()) > _USER_DATA["google"]:
            yield f"metadata.{item['key']}: too long"
