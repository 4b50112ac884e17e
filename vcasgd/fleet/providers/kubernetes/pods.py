"""Pods as the API server lists them, parsed strictly: others may write to the namespace, too."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from vcasgd.errors import CloudUnavailable
from vcasgd.fleet.providers.base import MachineState, one_line
from vcasgd.fleet.providers.kubernetes.manifest import POOL_LABEL, ZONE_LABEL, PodName

#: Reasons of a container that waits and won't start by itself.
_STUCK = (
    "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull",
    "ImagePullBackOff", "InvalidImageName", "RunContainerError",
)  # fmt: skip
_ENDED = ("Succeeded", "Failed")

Text = Annotated[str, Field(max_length=100_000)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel)


class _Metadata(_Model):
    name: Text
    labels: dict[str, str] = {}
    creation_timestamp: AwareDatetime
    deletion_timestamp: AwareDatetime | None = None


class _Spec(_Model):
    node_name: Text | None = None


class _Reason(_Model):
    reason: Text = ""
    message: Text = ""
    finished_at: AwareDatetime | None = None


class _State(_Model):
    waiting: _Reason | None = None
    terminated: _Reason | None = None


class _Container(_Model):
    state: _State = _State()


class _Status(_Model):
    phase: Text = "Pending"
    reason: Text = ""
    message: Text = ""
    start_time: AwareDatetime | None = None
    container_statuses: tuple[_Container, ...] | None = None


class _Pod(_Model):
    metadata: _Metadata
    spec: _Spec
    status: _Status = _Status()


class _ListMetadata(_Model):
    further: Text | None = Field(default=None, alias="continue")


class _List(_Model):
    metadata: _ListMetadata
    items: tuple[_Pod, ...]


@dataclass(frozen=True)
class Pod:
    """One of a pool's pods. Times are Unix seconds."""

    machine: PodName
    state: MachineState
    node: str
    zone: str | None
    """The zone that it was restricted to; None if it may be in any of the pool's."""
    created_at: float
    taken_at: float | None
    """When Kubernetes takes it; None if it isn't being deleted."""
    ended_at: float | None
    """None while it runs."""
    problem: str | None
    """Why it doesn't start, or why it failed."""


def parse_pods(text: bytes) -> tuple[list[Pod], str | None]:
    """Parse a list of pods, and return the machines and where the list continues.

    Raises :class:`~vcasgd.errors.CloudUnavailable` if the list isn't as expected: one without some
    machines would mean that these are gone.
    """
    try:
        parsed = _List.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CloudUnavailable(
            f"the API server lists pods that can't be read: {where}: {first['msg']}"
        ) from error
    pods = (_pod(each) for each in parsed.items)
    return [each for each in pods if each is not None], parsed.metadata.further


def _pod(pod: _Pod) -> Pod | None:
    machine = PodName.parse(pod.metadata.name)
    if machine is None or pod.metadata.labels.get(POOL_LABEL) != machine.pool:
        return None  # Another user gave it our label.
    container = (pod.status.container_statuses or (_Container(),))[0].state
    deleted, started = pod.metadata.deletion_timestamp, pod.status.start_time
    created = pod.metadata.creation_timestamp
    ended = pod.status.phase in _ENDED
    finished = container.terminated.finished_at if container.terminated else None
    return Pod(
        machine=machine,
        state=_state(pod.status.phase, deleted),
        node=pod.spec.node_name or "",
        zone=pod.metadata.labels.get(ZONE_LABEL),
        created_at=(started or created).timestamp(),
        taken_at=deleted.timestamp() if deleted else None,
        ended_at=(finished or created).timestamp() if ended else None,
        problem=_problem(pod.status, container),
    )


def _state(phase: str, deleted: datetime | None) -> MachineState:
    if phase in _ENDED:
        return MachineState.GONE
    if deleted is not None:
        return MachineState.LEAVING
    return MachineState.BOOTING if phase == "Pending" else MachineState.RUNNING


def _problem(status: _Status, container: _State) -> str | None:
    if container.waiting and container.waiting.reason in _STUCK:
        return one_line(f"{container.waiting.reason}: {container.waiting.message}")
    if status.phase != "Failed":
        return None
    ended = container.terminated or _Reason(reason=status.reason, message=status.message)
    # The end of a message has the error.
    return one_line(f"{ended.reason or 'Failed'}: {ended.message.strip()[-200:]}")
