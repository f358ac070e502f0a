"""The folder of a result: checked before anything is measured, written whole or not at all."""

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashverify.abba.outcome import UsageError

# Every file that a run of abba may write. Others in the folder are never touched.
OWN_FILES = ("abba.json", "abba.md", "abba.png")


class OutputFolder:
    """A folder that exists and can be written to."""

    def __init__(
        self,
        wanted: Path | None,
        caller_folder: Path,
        *,
        program: str = "abba",
        own_files: Sequence[str] = OWN_FILES,
    ) -> None:
        """Makes the folder; None means a new one under ``flashverify-results/``.

        ``own_files`` are the names that ``program`` writes.

        Raises UsageError where it cannot be made or written to.
        """
        self._own_files = own_files
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
        except OSError as error:
            self.abandon()
            place = wanted if wanted is not None else caller_folder
            raise UsageError(f"--out: cannot write to {place}: {error.strerror}") from error

    def write(self, files: Mapping[str, bytes]) -> None:
        """Replaces this folder's files of earlier runs by ``files``. Raises OSError."""
        unfinished = {name: self.path / f".{name}.{os.getpid()}.tmp" for name in files}
        try:
            for name, path in unfinished.items():
                path.write_bytes(files[name])
            for name in self._own_files:
                if name in files:
                    unfinished[name].replace(self.path / name)
                else:
                    (self.path / name).unlink(missing_ok=True)
        finally:
            for path in unfinished.values():
                path.unlink(missing_ok=True)

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
