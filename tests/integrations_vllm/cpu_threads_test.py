import os
import subprocess
import sys

import pytest

# Started with OpenMP's first thread bound to one CPU of two, as vLLM starts its workers.
CODE = """
import os, threading
import torch
cpus = sorted(os.sched_getaffinity(0))[:2]
torch.set_num_threads(2)
inside = threading.Event()
other = threading.Thread(target=inside.wait, daemon=True)
os.sched_setaffinity(0, {cpus[1]})
other.start()
os.sched_setaffinity(0, {cpus[0]})
import flashverify as fv
from flashverify.integrations.vllm import cpu_threads
assert fv.get_num_threads() == 1
assert cpu_threads.bound_cpus() >= set(cpus)
before = set(os.listdir("/proc/self/task"))
threads = cpu_threads.adopt()
started = set(os.listdir("/proc/self/task")) - before
assert os.sched_getaffinity(0) == {cpus[0]}
assert sum(fv.route_counts().values()) == 0
print(threads, len(started), all(os.sched_getaffinity(int(t)) >= set(cpus) for t in started))
"""


def test_threads_get_the_cpus_that_openmp_was_given():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU: nothing to share")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    threads, started, everywhere = done.stdout.split()
    assert int(threads) == 2
    assert int(started) >= 1
    assert everywhere == "True"


def test_without_a_binding_nothing_changes():
    code = (
        "import flashverify as fv; from flashverify.integrations.vllm import cpu_threads; "
        "before = fv.get_num_threads(); print(cpu_threads.adopt() == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
