"""What a dynamic loader reads in a shared object, told by binutils' readelf."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SharedObject:
    """The dynamic section and the symbols of one shared object.

    Attributes:
      machine: as readelf names it.
      soname: None where there is none.
      needed: names of the libraries it asks for.
      runpath: folders where it asks the loader to look, "" where it names none.
      needed_versions: {"GLIBC": [(2, 34), ...], ...}, of the symbols it imports.
      imported: undefined dynamic symbols, without their versions.
      exported: defined dynamic symbols, with their versions.
    """

    machine: str
    soname: str | None
    needed: list[str]
    runpath: str
    needed_versions: dict[str, list[tuple[int, ...]]]
    imported: set[str]
    exported: set[str]


def _readelf(path: Path, *options: str) -> str:
    command = ["readelf", "--wide", *options, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _needed_versions(text: str) -> dict[str, list[tuple[int, ...]]]:
    versions: dict[str, list[tuple[int, ...]]] = {}
    _, _, needs = text.partition("Version needs section")
    for name in re.findall(r"Name: (\S+)", needs):
        family, _, number = name.rpartition("_")
        versions.setdefault(family, []).append(tuple(int(part) for part in number.split(".")))
    return versions


def read(path: Path) -> SharedObject:
    """Reads a shared object.

    Raises:
      subprocess.CalledProcessError: readelf finds no ELF file there.
    """
    header = _readelf(path, "--file-header")
    dynamic = _readelf(path, "--dynamic")
    imported: set[str] = set()
    exported: set[str] = set()
    for line in _readelf(path, "--dyn-syms").splitlines():
        fields = line.split()
        # Num: Value Size Type Bind Vis Ndx Name, the name with its version
        if len(fields) < 8 or fields[4] not in ("GLOBAL", "WEAK"):
            continue
        if fields[6] == "UND":
            imported.add(fields[7].split("@")[0])
        else:
            exported.add(fields[7])

    def entries(tag: str) -> list[str]:
        return re.findall(rf"\({tag}\).*\[(.*)\]", dynamic)

    machine = re.search(r"Machine:\s+(.*)", header)
    return SharedObject(
        machine=machine.group(1) if machine else "",
        soname=next(iter(entries("SONAME")), None),
        needed=entries("NEEDED"),
        runpath=":".join(entries("RUNPATH") + entries("RPATH")),
        needed_versions=_needed_versions(_readelf(path, "--version-info")),
        imported=imported,
        exported=exported,
    )
