"""Reports every native file that a process has mapped; as a program, probes one arm.

Run by path in a Python of its own (see native_files.py), before any package is importable,
so this file imports nothing but the standard library at its top. Its argument is JSON:
``root`` the folder that holds the flashverify package to use, ``paths`` the rest of
``sys.path``, ``route`` the route to run once, ``device`` where. It prints a JSON object.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import BinaryIO, TypedDict


class NativeFile(TypedDict):
    """One ELF file mapped executable."""

    name: str
    path: str
    sha256: str
    size_bytes: int


class Report(TypedDict):
    """What one arm's process says of itself."""

    route: str
    precision_revision: int
    build_id: str
    library_path: str
    library_sha256: str
    extension_sha256: str
    files: list[NativeFile]


def mapped_native_files(
    known: dict[tuple[int, ...], str] | None = None, *, process: int | None = None
) -> list[NativeFile]:
    """Every ELF file that this process, or another one, has mapped executable, by path.

    ``known`` holds digests by ``identity``, so that a file of several hundred megabytes is
    read once. Raises RuntimeError for a file that was replaced after it was mapped, and
    OSError where the other process cannot be looked into.
    """
    paths = set()
    for line in Path(f"/proc/{process or 'self'}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
            paths.add(fields[5])
    files = []
    for path in sorted(paths):
        # Code made at run time (libffi's, a JIT's) lives in anonymous files.
        if path.startswith(("/memfd:", "/dev/")):
            continue
        # Device and inode numbers are no test: overlayfs shows others here than to stat().
        if path.endswith(" (deleted)"):
            raise RuntimeError(f"{path}: the file was replaced while it is mapped")
        try:
            with Path(path).open("rb") as file:
                if file.read(4) != b"\x7fELF":
                    continue
                stat = os.fstat(file.fileno())
                sha256 = (known or {}).get(identity(stat)) or _sha256(file)
        except OSError as error:
            raise RuntimeError(f"{path} is mapped but cannot be read: {error}") from error
        files.append(
            NativeFile(name=Path(path).name, path=path, sha256=sha256, size_bytes=stat.st_size)
        )
    return files


def identity(stat: os.stat_result) -> tuple[int, ...]:
    """What changes whenever a file's contents do."""
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def probe(root: str, route: str, device: str) -> Report:
    """Runs ``route`` once on 16 keys with the flashverify under ``root``."""
    import torch

    import flashverify as fv

    # Not resolved further than the folder: in a runfiles tree the files in it are links.
    found = Path(fv.__file__).absolute().parent.parent
    if found.resolve() != Path(root).resolve():
        raise RuntimeError(f"flashverify came from {found}, not from {root}")
    cache = torch.ones(1, 16, 1, 64).to(torch.float8_e4m3fn).to(device)
    fv.paged_attention(
        torch.ones(1, 1, 64, dtype=torch.float16, device=device),
        cache,
        cache,
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.full((1,), 16, dtype=torch.int32, device=device),
        route=fv.Route(route),
    )
    info = fv.native_info()
    return Report(
        route=str(fv.last_route()),
        precision_revision=info["precision_revision"],
        build_id=info["build_id"],
        library_path=info["library_path"],
        library_sha256=info["library_sha256"],
        extension_sha256=info["extension_sha256"],
        files=mapped_native_files(),
    )


def _main() -> None:
    request = json.loads(sys.argv[1])
    sys.path[:] = [request["root"], *request["paths"]]
    print(json.dumps(probe(request["root"], request["route"], request["device"])))


if __name__ == "__main__":
    _main()
