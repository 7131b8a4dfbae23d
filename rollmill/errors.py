"""One error class per boundary. Each message names the boundary, the value that was wrong, and a remedy.

The error of a rollout, a request or a step is caught at one boundary and recorded once; nothing below that boundary
swallows it. `hint` says what the reader should do next; the command line prints it on a line of its own.
"""

from __future__ import annotations


class RollmillError(Exception):
    """Base class: Rollmill refuses or fails to do something, and says what the reader can do about it."""

    boundary = "rollmill"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.boundary}: {self.message}"
        return f"{text}\nhint: {self.hint}" if self.hint else text


class ConfigError(RollmillError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one."""

    boundary = "config"


class StorageError(RollmillError):
    """An object or the database could not be read or written."""

    boundary = "storage"


class ObjectMissing(StorageError, KeyError):
    """No object has this key."""

    __str__ = RollmillError.__str__


class ObjectTruncated(StorageError):
    """The object is shorter than it should be. It is damaged: retrying does not help."""


class ObjectExists(StorageError):
    """A create-only object exists already: someone else wrote it first."""


class WeightsError(RollmillError):
    """A version cannot be read, does not match its digest, or cannot be published."""

    boundary = "weights"


class EngineError(RollmillError):
    """The engine cannot serve this request."""

    boundary = "engine"


class GatewayError(RollmillError):
    """A request to the gateway is malformed, unauthorised, or cannot be served.

    `status` is the HTTP status. `code` tells programs more than the status does, such as `context_length_exceeded`.
    `retry_after_s` becomes the header Retry-After.
    """

    boundary = "gateway"

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        hint: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class TaskError(RollmillError):
    """A task is malformed: its image is missing, its grading cannot run."""

    boundary = "task"


class MachineError(RollmillError):
    """The machine itself failed (not the command that ran in it). Never a reward."""

    boundary = "machine"


class Overcommitted(MachineError):
    """Others of the host had the processors, so a time-out says nothing about the command."""


class NoCapacity(MachineError):
    """No machine can start now. Trying again after `retry_after_s` seconds may succeed."""

    def __init__(self, message: str, *, retry_after_s: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class HarnessError(RollmillError):
    """The harness could not continue, and the policy is not the cause."""

    boundary = "harness"


class RewardError(RollmillError):
    """A reward could not be determined, and the policy is not the cause. Never a zero."""

    boundary = "reward"


class RewardUnavailable(RewardError):
    """What grades cannot be reached, or talks nonsense. Trying again later may help."""


class TrajectoryError(RollmillError):
    """An illegal transition, or a record that contradicts itself."""

    boundary = "trajectories"


class TrajectoryChanged(TrajectoryError):
    """A trajectory was deleted or quarantined after it was read. Reading again gives the new state."""


class TrainingError(RollmillError):
    """The trainer cannot continue: unreadable checkpoint, different digests, numbers that are not finite."""

    boundary = "training"
