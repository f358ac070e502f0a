"""The folder of a result: checked before anything is measured, written whole or not at all."""

import contextlib
import datetime
import os
import types
from collections.abc import Mapping
from pathlib import Path

from flashverify.abba.outcome import UsageError, WriteError


def own_files(program: str) -> tuple[str, ...]:
    """Every file that a run of ``program`` may write. Others in a folder are never touched."""
    return tuple(f"{program}.{ending}" for ending in ("json", "md", "png"))


class OutputFolder:
    """A folder that exists and can be written to; after a ``with`` that fails, as it was."""

    def __init__(self, wanted: Path | None, caller_folder: Path, *, program: str) -> None:
        """Makes the folder; None means a new one under ``flashverify-results/``.

        Raises UsageError where it cannot be made, or ``program`` cannot write its files there.
        """
        self._own_files = own_files(program)
        self._made: list[Path] = []
        try:
            self.path = wanted if wanted is not None else _new_path(caller_folder, program)
            missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
            for folder in reversed(missing):
                folder.mkdir()
                self._made.append(folder)
            trial = self.path / f".{program}.{os.getpid()}.tmp"
            trial.write_bytes(b"")
            trial.unlink()
            for name in self._own_files:
                if (self.path / name).is_dir():
                    raise UsageError(f"--out: {self.path / name} is a folder, and not a file")
        except OSError as error:
            self.abandon()
            place = wanted if wanted is not None else caller_folder
            raise UsageError(f"--out: cannot write to {place}: {error.strerror}") from error

    def __enter__(self) -> "OutputFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if error is not None:
            self.abandon()

    def write(self, files: Mapping[str, bytes]) -> None:
        """Replaces this folder's files of earlier runs by ``files``. Raises WriteError."""
        unfinished = {name: self.path / f".{name}.{os.getpid()}.tmp" for name in files}
        try:
            for name, path in unfinished.items():
                path.write_bytes(files[name])
            for name in self._own_files:
                if name in files:
                    unfinished[name].replace(self.path / name)
                else:
                    (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(f"cannot write to {self.path}: {error.strerror}") from error
        finally:
            for path in unfinished.values():
                with contextlib.suppress(OSError):
                    path.unlink()

    def abandon(self) -> None:
        """Removes the folders that this object made, as far as they are empty."""
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:
                return


def _new_path(caller_folder: Path, program: str) -> Path:
    now = datetime.datetime.now(datetime.timezone.utc)
    base = caller_folder / "flashverify-results" / f"{program}-{now:%Y%m%d-%H%M%S}"
    candidate, count = base, 1
    while candidate.exists():
        count += 1
        candidate = base.with_name(f"{base.name}-{count}")
    return candidate
