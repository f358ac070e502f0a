"""Caches beyond 2 and 4 GiB, and on a device that is not the first."""

import pytest
import torch

import flashverify as fv
from tests.support import backends, cases

FREE_BYTES = 24 << 30


@pytest.mark.parametrize("route", [*backends.FP32_ROUTES, "grouped_half"])
@pytest.mark.parametrize("hnd", [False, True])
@backends.on_cuda
def test_offsets_beyond_32_bits(hnd: bool, route: str, backend: backends.Backend) -> None:
    """The same pages, low in a small cache and far up in one of 6 GB."""
    if torch.cuda.mem_get_info()[0] < FREE_BYTES:
        pytest.skip("the device has no 24 GiB to give")
    page_size, heads, dim = 1728, 2, 256
    request = cases.random_request(3, q_len=8, seq_len=4000, q_heads=6, kv_heads=2, head_dim=dim)
    case = cases.paged([request], page_size=page_size, spare_pages=0)
    inputs = backends.arguments(case, "cuda")
    near = backends.attend(case, backend, route=route, out_dtype=torch.float32)
    page_bytes = page_size * heads * dim
    pages = (6 << 30) // page_bytes
    ids = torch.tensor([(1 << 31) // page_bytes + 1, (1 << 32) // page_bytes + 1, pages - 1])
    shape = (pages, heads, page_size, dim) if hnd else (pages, page_size, heads, dim)
    far = {}
    for name in ("k_cache", "v_cache"):
        whole = torch.full(shape, 0xFF, dtype=torch.uint8, device="cuda")
        view = whole.transpose(1, 2) if hnd else whole
        small = inputs[name].view(torch.uint8)
        view[ids.cuda()] = small[case.page_table[0, :3].long().cuda()]
        far[name] = view.view(torch.float8_e4m3fn)
    table = torch.full_like(inputs["page_table"], -1)
    table[0, :3] = ids.to(torch.int32).cuda()
    out = torch.full(case.q.shape, float("nan"), dtype=torch.float32, device="cuda")
    with backend.selected():
        _, lse = fv.paged_attention(
            **{**inputs, **far, "page_table": table}, route=route, out=out, return_lse=True
        )
    backends.assert_same_bits(backends.Result(out.cpu(), lse.cpu()), near)


@pytest.mark.parametrize("route", backends.FP32_ROUTES)
@backends.on_cuda
def test_the_tensors_device_is_used(route: str, backend: backends.Backend) -> None:
    """On the second device, whatever the current one is."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    request = cases.random_request(4, q_len=8, seq_len=900)
    case = cases.paged([request])
    expected = backends.attend(case, backend, route=route, out_dtype=torch.float32)
    inputs = backends.arguments(case, "cuda:1")
    out = torch.empty(case.q.shape, dtype=torch.float32, device="cuda:1")
    with backend.selected():
        _, lse = fv.paged_attention(**inputs, route=route, out=out, return_lse=True)
    assert torch.cuda.current_device() == 0
    backends.assert_same_bits(backends.Result(out.cpu(), lse.cpu()), expected)
