"""Processes that are started: their end, and what is seen of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashverify.abba import probe
from tests.acceptance.raw_server import RawServer, once
from tools.model_ab import processes
from tools.model_ab.processes import Configuration, StartedServer, StartError


def started(tmp_path, script):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return StartedServer("A", Configuration(python, [], {}), tmp_path / "log")


def test_stop_ends_children_too(tmp_path):
    server = started(tmp_path, "sleep 1000 & trap '' TERM; wait; wait")
    deadline = time.monotonic() + 20
    while not server.log.exists() or len(processes._with_children(server.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = processes._with_children(server.pid)
    server.stop()
    for pid in pids:
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    server.stop()


def test_a_server_that_never_answers(tmp_path):
    server = started(tmp_path, "echo loading; exec sleep 1000")
    with pytest.raises(StartError, match=r"A did not start: no answer in 0\.5 s: loading"):
        server.wait(0.5)
    server.stop()


def test_a_server_that_cannot_be_run(tmp_path):
    with pytest.raises(StartError, match="A: cannot run"):
        StartedServer("A", Configuration(tmp_path / "absent", [], {}), tmp_path / "log")


def test_a_python_without_flashverify(tmp_path):
    server = started(tmp_path, "echo No module named flashverify >&2; exit 1")
    with pytest.raises(StartError, match="No module named flashverify"):
        server.native_info()
    server.stop()


@pytest.mark.parametrize("printed", ["[]", "5", "no JSON", ""])
def test_a_flashverify_that_says_something_else(tmp_path, printed):
    server = started(tmp_path, f"echo '{printed}'")
    with pytest.raises(StartError, match="A: python -m flashverify --json: "):
        server.native_info()
    server.stop()


def test_a_port_that_another_program_took(tmp_path):
    server = started(tmp_path, "exec sleep 1000")
    with RawServer(once(b"SSH-2.0-OpenSSH_9.2\r\n")) as raw:
        server.url = raw.url
        with pytest.raises(StartError, match=r"A did not start: no answer in 0\.5 s"):
            server.wait(0.5)
    server.stop()


def test_native_files_are_those_of_the_process_and_its_children():
    script = "import subprocess, sys; print(1, flush=True); subprocess.run(['sleep', '1000'])"
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        parent.stdout.readline()
        deadline = time.monotonic() + 20
        while len(processes._with_children(parent.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        names = [file["name"] for file in processes.native_files(parent.pid)]
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()
    assert any(name.startswith("python") for name in names)
    assert any("sleep" in name or "coreutils" in name or "busybox" in name for name in names)
    assert names.count("libc.so.6") <= 1
    with pytest.raises(RuntimeError, match=f"process {parent.pid}"):
        processes.native_files(parent.pid)


def test_this_process_seen_from_outside_is_this_process():
    seen = {(file["path"], file["sha256"]) for file in processes.native_files(os.getpid())}
    own = {(file["path"], file["sha256"]) for file in probe.mapped_native_files()}
    assert own <= seen
