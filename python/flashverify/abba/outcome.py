"""How a run can end other than by being done, and the exit code of each ending."""

import enum


class ExitCode(enum.IntEnum):
    """What the process returns."""

    DONE = 0
    WRITE_FAILED = 1
    BAD_ARGUMENTS = 2
    NATIVE_DIFFERS = 3
    ARM_NOT_RUN = 4
    INTERRUPTED = 130


class UsageError(Exception):
    """The arguments, or the file that they name, cannot be used. Nothing is written."""


class NotRunError(Exception):
    """The experiment is sound but cannot be carried out here; the result says why."""

    exit_code = ExitCode.ARM_NOT_RUN


class WriteError(Exception):
    """The result was measured and cannot be written."""


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP arrived."""
