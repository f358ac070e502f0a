import shutil
import subprocess
from pathlib import Path

import pytest

BAZELW = Path("bazelw").resolve()
REPORT = 'echo "$(basename "$0") $* version=${USE_BAZEL_VERSION-} in $PWD"'


class Machine:
    """A machine with just the programs that a test puts on it."""

    def __init__(self, folder):
        self.bin = folder / "bin"
        self.root = folder / "checkout"
        self.bin.mkdir()
        self.root.mkdir()
        shutil.copy(BAZELW, self.root / "bazelw")
        for name in ("basename", "chmod", "dirname", "sh"):
            self.bin.joinpath(name).symlink_to(shutil.which(name))
        self.has("g++", "python3")

    def has(self, *names, code="exit 0"):
        for name in names:
            path = self.bin / name
            path.write_text(f"#!/bin/sh\n{code}\n")
            path.chmod(0o755)

    def has_apt(self, user):
        self.has("id", code=f"echo {user}")
        installs = f'echo "$*" >> {self.bin}/apt.log; echo "#!/bin/sh" > {self.bin}/bazel-4; '
        installs += f"echo '{REPORT}' >> {self.bin}/bazel-4; chmod +x {self.bin}/bazel-4"
        self.has("apt-get", code=installs)

    def run(self, *arguments, cwd=None, **variables):
        return subprocess.run(
            [self.root / "bazelw", *arguments],
            capture_output=True,
            text=True,
            cwd=cwd or self.root,
            env={"PATH": str(self.bin), **variables},
        )

    def installed(self):
        log = self.bin / "apt.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        (["bazel"], "bazel"),
        (["bazel", "bazelisk"], "bazelisk"),
        (["bazel", "bazel-4"], "bazel-4"),
        (["bazel", "bazel-4", "bazelisk"], "bazel-4"),
    ],
)
def test_bazel_is_found(machine, present, chosen):
    machine.has(*present, code=REPORT)
    done = machine.run("build", "//a b")
    assert done.stdout == f"{chosen} build //a b version=6.5.0 in {machine.root}\n"
    assert done.returncode == 0


def test_the_caller_may_choose(machine):
    machine.has("bazel-4", "my-bazel", code=REPORT)
    done = machine.run("info", BAZEL="my-bazel", USE_BAZEL_VERSION="5.4.1")
    assert done.stdout == f"my-bazel info version=5.4.1 in {machine.root}\n"


@pytest.mark.parametrize(
    ("arguments", "passed_on"),
    [
        ("test //tests/engines/...", "test --config=engines //tests/engines/..."),
        ("build -k //tests/engines:all", "build --config=engines -k //tests/engines:all"),
        ("test //tests/...", "test //tests/..."),
        ("query //tests/engines/...", "query //tests/engines/..."),
    ],
)
def test_engine_tests_run_when_they_are_named(machine, arguments, passed_on):
    machine.has("bazel", code=REPORT)
    done = machine.run(*arguments.split())
    assert done.stdout == f"bazel {passed_on} version=6.5.0 in {machine.root}\n"


def test_the_exit_status_is_bazels(machine):
    machine.has("bazel", code="exit 37")
    assert machine.run("test").returncode == 37


def test_a_folder_inside_is_kept_and_one_outside_is_left(machine, tmp_path):
    machine.has("bazel", code=REPORT)
    inside = machine.root / "native/cpu"
    inside.mkdir(parents=True)
    assert machine.run("build", ":all", cwd=inside).stdout.endswith(f" in {inside}\n")
    beside = tmp_path / "checkout2"
    beside.mkdir()
    assert machine.run("build", ":all", cwd=beside).stdout.endswith(f" in {machine.root}\n")


def test_root_on_debian_gets_what_is_missing(machine):
    (machine.bin / "g++").unlink()
    machine.has("python3", code='case "$*" in *pip*) exit 0;; *) exit 1;; esac')  # no headers
    machine.has_apt(user=0)
    done = machine.run("version")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"bazel-4 version version=6.5.0 in {machine.root}\n"
    assert [line.split()[0] for line in machine.installed()] == ["update", "install"]
    assert machine.installed()[1].endswith(" bazel-bootstrap python3-dev g++")


def test_nothing_missing_installs_nothing(machine):
    machine.has("bazel-4", code=REPORT)
    machine.has_apt(user=0)
    machine.has("bazel-4", code=REPORT)
    assert machine.run("version").returncode == 0
    assert machine.installed() == []


@pytest.mark.parametrize("apt", [True, False])
def test_others_are_told_what_is_missing(machine, apt):
    if apt:
        machine.has_apt(user=1000)
    (machine.bin / "python3").unlink()
    done = machine.run("version")
    assert done.returncode == 1
    assert "lacks:" in done.stderr
    for package in ("bazel-bootstrap", "python3", "python3-pip", "python3-dev"):
        assert package in done.stderr
    assert machine.installed() == []
