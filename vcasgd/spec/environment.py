"""Needs of a job besides its code: variables, secrets, packages, and commands."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vcasgd.spec.values import StrictModel, described

#: Pattern of the name of an environment variable.
NAME_PATTERN = described(
    r"^[A-Za-z_][A-Za-z0-9_]{0,127}$", "the name of a variable: letters, digits, and underscores"
)
#: Most variables, most secrets, and most commands of a job.
MAX_VARIABLES, MAX_COMMANDS = 200, 50
#: Most characters of a value, and of a command.
MAX_VALUE_LENGTH, MAX_COMMAND_LENGTH = 32_768, 10_000
#: Starts of the names of variables that the platform sets, or that are read before a job's are set.
_PLATFORM = ("VCASGD_", "RAY_")
_TOO_LATE = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "GOMP_", "KMP_")


def _settable(name: str) -> str:
    if name.startswith(_PLATFORM):
        raise ValueError(f"{name} is a variable of the platform; choose another name")
    if name.startswith(_TOO_LATE):
        raise ValueError(
            f"{name} would have no effect, because a worker has imported torch before it knows "
            "its job; use functions such as torch.set_num_threads in the task"
        )
    return name


EnvName = Annotated[str, Field(pattern=NAME_PATTERN), AfterValidator(_settable)]
EnvValue = Annotated[str, Field(max_length=MAX_VALUE_LENGTH)]


class SecretSource(StrictModel):
    """Source of a secret's value for the command line; by default, a variable of its name."""

    env: str | None = Field(
        default=None, pattern=NAME_PATTERN, description="variable of your environment"
    )
    file: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="file on your computer, relative to the job file",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_value(cls, value: Any) -> Any:
        if value is None:
            return {}
        if not isinstance(value, dict | SecretSource):
            # The message must not contain the value: it may be the secret.
            raise ValueError("must name a source; the value doesn't belong in a job file")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> SecretSource:
        if self.env is not None and self.file is not None:
            raise ValueError("must have env or file, not both")
        return self


def _requirements_file(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise ValueError(f"must be a file in working_dir; not {path}")
    return path


def _commands(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise ValueError("must be a shell command, or a list of them")


Environment = Annotated[dict[EnvName, EnvValue], Field(max_length=MAX_VARIABLES)]
Secrets = Annotated[dict[EnvName, SecretSource], Field(max_length=MAX_VARIABLES)]
RequirementsFile = Annotated[
    str, Field(min_length=1, max_length=1000), AfterValidator(_requirements_file)
]
Command = Annotated[str, Field(min_length=1, max_length=MAX_COMMAND_LENGTH)]
Commands = Annotated[
    tuple[Command, ...], Field(max_length=MAX_COMMANDS), BeforeValidator(_commands)
]
