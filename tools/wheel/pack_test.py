import zipfile

import pytest

from tools.wheel import pack


@pytest.fixture
def arguments(tmp_path):
    for name, text in {
        "a.py": "a = 1\n",
        "b.so": "binary",
        "LICENSE": "all yours",
        "metadata.txt": "# a comment\nSummary: s\n\nRequires-Dist: numpy\n",
        "README.md": "# Read me\n",
        "points.txt": "[engine.plugins]\na = a:register\n",
    }.items():
        (tmp_path / name).write_text(text)
    return [
        "--distribution=two-words",
        "--version=1.2",
        "--tag=cp310-abi3-manylinux_2_34_x86_64",
        f"--metadata={tmp_path / 'metadata.txt'}",
        f"--description={tmp_path / 'README.md'}",
        f"--license=LICENSE={tmp_path / 'LICENSE'}",
        f"--file=pkg/b.so={tmp_path / 'b.so'}",
        f"--file=pkg/a.py={tmp_path / 'a.py'}",
    ]


def test_members(tmp_path, arguments):
    out = tmp_path / "w.whl"
    pack.main([f"--out={out}", *arguments])
    with zipfile.ZipFile(out) as wheel:
        assert wheel.namelist() == [
            "pkg/a.py",
            "pkg/b.so",
            "two_words-1.2.dist-info/METADATA",
            "two_words-1.2.dist-info/WHEEL",
            "two_words-1.2.dist-info/licenses/LICENSE",
            "two_words-1.2.dist-info/RECORD",
        ]
        modes = [entry.external_attr >> 16 & 0o777 for entry in wheel.infolist()]
        assert modes == [0o644, 0o755, 0o644, 0o644, 0o644, 0o644]
        assert wheel.read("two_words-1.2.dist-info/METADATA").decode() == (
            "Metadata-Version: 2.4\nName: two-words\nVersion: 1.2\nSummary: s\n"
            "Requires-Dist: numpy\nLicense-File: LICENSE\n"
            "Description-Content-Type: text/markdown\n\n# Read me\n"
        )


def test_entry_points_are_members_of_dist_info(tmp_path, arguments):
    out = tmp_path / "w.whl"
    pack.main([f"--out={out}", *arguments, f"--entry_points={tmp_path / 'points.txt'}"])
    with zipfile.ZipFile(out) as wheel:
        points = wheel.read("two_words-1.2.dist-info/entry_points.txt").decode()
        assert points == "[engine.plugins]\na = a:register\n"
        assert "entry_points.txt,sha256=" in wheel.read("two_words-1.2.dist-info/RECORD").decode()


def test_bytes_depend_on_the_contents_alone(tmp_path, arguments):
    first, second, third = (tmp_path / name for name in ("1.whl", "2.whl", "3.whl"))
    pack.main([f"--out={first}", *arguments])
    pack.main([f"--out={second}", *reversed(arguments)])
    assert first.read_bytes() == second.read_bytes()
    (tmp_path / "a.py").write_text("a = 2\n")
    pack.main([f"--out={third}", *arguments])
    assert first.read_bytes() != third.read_bytes()


def test_two_files_of_one_name_are_refused(tmp_path, arguments):
    again = f"--file=pkg/a.py={tmp_path / 'LICENSE'}"
    with pytest.raises(SystemExit, match=r"two files for pkg/a\.py"):
        pack.main([f"--out={tmp_path / 'w.whl'}", *arguments, again])


def test_a_compressed_tag_set_is_spelt_out():
    text = pack.wheel_text("cp310.cp311-abi3-a.b")
    assert text.splitlines()[3:] == [
        "Tag: cp310-abi3-a",
        "Tag: cp310-abi3-b",
        "Tag: cp311-abi3-a",
        "Tag: cp311-abi3-b",
    ]
