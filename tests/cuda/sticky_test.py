"""An error that stays: after a kernel has failed no call succeeds, and each says why.

It is provoked by a kernel of torch's that asserts, in a process of its own.
"""

import os
import subprocess
import sys

from tests.support import backends

_PROGRAM = """
import sys
import torch
import flashverify as fv
from tests.support import backends, cases

backend = backends.Backend("cuda", image=sys.argv[1] or None)
request = cases.random_request(1, q_len=8, seq_len=300, q_heads=6, head_dim=128)
arguments = backends.arguments(cases.paged([request], page_size=16), "cuda")
k_cache, v_cache = arguments["k_cache"], arguments["v_cache"]
rows = torch.zeros((1, k_cache.shape[2], 128), device="cuda", dtype=torch.float16)
slot = torch.zeros(1, device="cuda", dtype=torch.int64)
states = torch.zeros((2, 1, 1, 128), device="cuda"), torch.zeros((2, 1, 1), device="cuda")
workspace = fv.Workspace.unplanned("cuda")
out = torch.empty_like(arguments["q"])
calls = {
    "attention": lambda: fv.paged_attention(**arguments, workspace=workspace, out=out),
    "merge": lambda: fv.merge_states(*states),
    "append": lambda: fv.append_kv(rows, rows, k_cache, v_cache, slot),
    "faults": workspace.check_faults,
    "append faults": lambda: fv.check_append_faults("cuda"),
}
with backend.selected():
    for call in calls.values():
        call()
    torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")]
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        print("torch: failed")
    for name, call in calls.items():
        try:
            call()
        except fv.DeviceError as error:
            print(f"{name}: {error}".replace("\\n", " "))
        else:
            print(f"{name}: no error")
sys.stdout.flush()
"""


@backends.on_cuda
def test_every_call_reports_an_error_that_stays(backend: backends.Backend) -> None:
    command = [sys.executable, "-c", _PROGRAM, backend.image or ""]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stdout.splitlines() if ": " in line]
    assert [line.split(": ")[0] for line in lines] == [
        "torch", "attention", "merge", "append", "faults", "append faults",
    ], done.stdout + done.stderr  # fmt: skip
    for line in lines[1:]:
        # The driver's own name and text, under the name of what was tried.
        assert "CUDA_ERROR_ASSERT" in line and "device-side assert" in line, line
