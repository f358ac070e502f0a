"""A few small calls of every CUDA kernel, for compute-sanitizer, which makes each 100 times slower.

    compute-sanitizer --tool memcheck python tests/cuda/sanitized.py [image ...]

Images are those of `flashverify.native_info()`; "own" is the device's. The answers are checked too.
"""

import sys

import torch

import flashverify as fv
from tests.support import backends, cases, tolerances

# (q_len, seq_len) requests, head_dim, page size, layout: whole tiles, bulk copies and gathers,
# several row tiles, an empty request, folds.
PROBLEMS = (
    ([(8, 700), (1, 130), (0, 20), (3, 0)], 256, 48, "paired"),
    ([(8, 300)], 128, 17, "padded"),
    ([(2, 1500), (40, 90)], 64, 16, "nhd"),
)


def run(image: str) -> None:
    """Every route over every problem, and the cache write and the merge, by one image."""
    backend = backends.Backend("cuda", image=None if image == "own" else image)
    for lengths, head_dim, page_size, layout in PROBLEMS:
        requests = [
            cases.random_request(i, q_len=q, seq_len=n, q_heads=6, kv_heads=2, head_dim=head_dim)
            for i, (q, n) in enumerate(lengths)
        ]
        case = cases.paged(requests, page_size=page_size, layout=layout)
        expected = tolerances.expected(case)
        for route in backends.routes_for(case, backend):
            result = backends.attend(case, backend, route=route)
            half = route in backends.HALF_ROUTES
            expected.check(result.out, result.lse, half_partials=half, what=f"{image} {route}")
    rows = torch.randn((5, 2, 64), device="cuda")
    caches = [torch.zeros((4, 16, 2, 64), dtype=torch.uint8, device="cuda") for _ in range(2)]
    slots = torch.tensor([3, -1, 60, 17, 0], device="cuda")
    with backend.selected():
        fv.append_kv(rows, rows, *caches, slots, kv_dtype="fp8_e4m3")
        fv.merge_states(torch.randn((5, 3, 2, 64), device="cuda"),
                        torch.randn((5, 3, 2), device="cuda"))  # fmt: skip
    torch.cuda.synchronize()
    print(f"{image}: done", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or ["own"]:
        run(name)
