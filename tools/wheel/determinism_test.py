"""Two builds from the same sources, under different paths, give the same wheel."""

import os
import zipfile
from pathlib import Path


def test_two_builds_give_the_same_bytes():
    first, second = Path(os.environ["FIRST"]), Path(os.environ["SECOND"])
    assert first.name == second.name
    assert first != second
    with zipfile.ZipFile(first) as a, zipfile.ZipFile(second) as b:
        assert a.namelist() == b.namelist()
        different = [name for name in a.namelist() if a.read(name) != b.read(name)]
    assert different == []
    assert first.read_bytes() == second.read_bytes()
