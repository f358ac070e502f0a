"""A captured call stays right whatever happens to its inputs, and says what was wrong."""

import pytest
import torch

import flashverify as fv
from tests.cuda.captured import Captured
from tests.support import backends, cases, tolerances

ROUTES = pytest.mark.parametrize("route", [*backends.FP32_ROUTES, "grouped_half", "scalar_half"])
PAGE_SIZE = 32
MAX_PAGES = 60
CAPACITY = PAGE_SIZE * MAX_PAGES


def case_of(
    lengths: list[tuple[int, int]], *, seed: int = 0, rows: int | None = None, **options: object
) -> cases.Case:
    """(q_len, seq_len) requests in a cache of fixed size, with rows of padding behind theirs."""
    requests = [
        cases.random_request(
            100 * seed + i, q_len=q_len, seq_len=seq_len, q_heads=6, kv_heads=2, head_dim=64
        )
        for i, (q_len, seq_len) in enumerate(lengths)
    ]
    used = sum(-(-seq_len // PAGE_SIZE) for _, seq_len in lengths)
    spare = len(lengths) * MAX_PAGES - used
    case = cases.paged(requests, page_size=PAGE_SIZE, seed=seed, spare_pages=spare, **options)
    table = torch.full((len(lengths), MAX_PAGES), -1, dtype=torch.int32)
    width = min(MAX_PAGES, case.page_table.shape[1])
    table[:, :width] = case.page_table[:, :width]
    q = case.q
    if rows is not None:
        padding = torch.full((rows - len(q), *q.shape[1:]), float("nan"), dtype=q.dtype)
        q = torch.cat([q, padding])
    return cases.Case(
        q, case.k_cache, case.v_cache, table, case.seq_lens, case.query_start_loc, case.options
    )


def tensors_of(case: cases.Case) -> dict[str, torch.Tensor]:
    names = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "query_start_loc")
    return {name: getattr(case, name) for name in names}


LENGTHS = [
    [(8, 900), (8, 40), (8, 300)],  # as captured
    [(8, CAPACITY), (8, 41), (8, 8)],  # up to capacity
    [(8, 901), (8, 0), (8, 128)],  # one became empty
    [(8, 3), (8, 1), (8, 129)],  # fewer keys than rows
    [(8, 0), (8, 0), (8, 0)],
]


@ROUTES
@backends.on_cuda
def test_replays_follow_lengths_pages_and_contents(route: str, backend: backends.Backend) -> None:
    captured = Captured(case_of(LENGTHS[0]), backend, route)
    for seed, lengths in enumerate([*LENGTHS, LENGTHS[0]]):
        case = case_of(lengths, seed=seed)
        captured.put(**tensors_of(case))
        replayed = captured.replay()
        backends.assert_same_bits(replayed, captured.eager(), lengths)
        expected = tolerances.expected(case)
        half = route in backends.HALF_ROUTES
        expected.check(replayed.out, replayed.lse, half_partials=half, what=f"{route} {lengths}")
    captured.workspace.check_faults()


@ROUTES
@backends.on_cuda
def test_replays_follow_scales(route: str, backend: backends.Backend) -> None:
    scales = {"k_dequant_scale": torch.ones(2), "v_dequant_scale": torch.ones(1)}
    captured = Captured(case_of(LENGTHS[0], **scales), backend, route)
    for factor in (0.25, 3.0):
        scales = {"k_dequant_scale": factor * torch.tensor([0.3, 0.7]),
                  "v_dequant_scale": torch.tensor([factor])}  # fmt: skip
        captured.put(**scales)
        replayed = captured.replay()
        expected = tolerances.expected(case_of(LENGTHS[0], **scales))
        half = route in backends.HALF_ROUTES
        expected.check(replayed.out, replayed.lse, half_partials=half, what=f"{factor}")


@ROUTES
@backends.on_cuda
def test_rows_dealt_anew_and_padding(route: str, backend: backends.Backend) -> None:
    """Requests of other lengths in the same 24 rows; the rows behind them are not written."""
    captured = Captured(case_of(LENGTHS[0]), backend, route)
    for seed, lengths in enumerate(
        ([(1, 900), (8, 40), (3, 1500)], [(1, 7), (1, 8), (1, 9)], [(0, 5), (22, 700), (2, 2)])
    ):
        case = case_of(lengths, seed=seed, rows=24)
        captured.put(**tensors_of(case))
        replayed = captured.replay()
        used = sum(q_len for q_len, _ in lengths)
        assert torch.isnan(replayed.out[used:]).all() and torch.isnan(replayed.lse[used:]).all()
        expected = tolerances.expected(case_of(lengths, seed=seed))
        half = route in backends.HALF_ROUTES
        expected.check(
            replayed.out[:used], replayed.lse[:used], half_partials=half, what=f"{lengths}"
        )


@pytest.mark.parametrize(
    ("length", "fault"),
    [(CAPACITY + 1, "seq_lens: above the capacity"), (2**31 - 1, "above"), (-1, "negative"),
     (-(2**31), "negative")],
)  # fmt: skip
@ROUTES
@backends.on_cuda
def test_an_unusable_length_makes_its_rows_nan_and_is_told(
    length: int, fault: str, route: str, backend: backends.Backend
) -> None:
    captured = Captured(case_of(LENGTHS[0]), backend, route)
    right = captured.replay()
    captured.workspace.check_faults()
    captured.inputs["seq_lens"][1] = length
    wrong = captured.replay()
    assert torch.isnan(wrong.out[8:16]).all() and torch.isnan(wrong.lse[8:16]).all()
    for rows in (slice(0, 8), slice(16, 24)):
        backends.assert_same_bits(
            backends.Result(wrong.out[rows], wrong.lse[rows]),
            backends.Result(right.out[rows], right.lse[rows]),
            "the other requests",
        )
    with pytest.raises(fv.OutOfRangeError, match=fault):
        captured.workspace.check_faults()
    captured.workspace.check_faults()  # told once
    captured.put(seq_lens=case_of(LENGTHS[0]).seq_lens)
    backends.assert_same_bits(captured.replay(), right, "after the fault")
    captured.workspace.check_faults()


@pytest.mark.parametrize("page", [-1, 2**31 - 1, -(2**31), 3 * MAX_PAGES])
@ROUTES
@backends.on_cuda
def test_a_page_that_is_not_there_is_told_and_not_read(
    page: int, route: str, backend: backends.Backend
) -> None:
    captured = Captured(case_of(LENGTHS[0]), backend, route)
    right = captured.replay()
    captured.inputs["page_table"][0, 3] = page
    wrong = captured.replay()
    rows = slice(8, 24)
    backends.assert_same_bits(
        backends.Result(wrong.out[rows], wrong.lse[rows]),
        backends.Result(right.out[rows], right.lse[rows]),
        "the other requests",
    )
    with pytest.raises(fv.OutOfRangeError, match="page_table"):
        captured.workspace.check_faults()


@backends.on_cuda
@pytest.mark.parametrize("starts", [[0, 8, 40, 24], [0, -5, 16, 24], [0, 8, 2**31 - 1, 24]])
def test_query_offsets_beyond_the_rows_are_told(
    starts: list[int], backend: backends.Backend
) -> None:
    captured = Captured(case_of(LENGTHS[0]), backend, "grouped_fp32")
    captured.put(query_start_loc=torch.tensor(starts, dtype=torch.int32))
    captured.replay()
    with pytest.raises(fv.OutOfRangeError, match="query_start_loc"):
        captured.workspace.check_faults()


@backends.on_cuda
def test_a_slot_that_is_not_there_is_skipped_and_told(backend: backends.Backend) -> None:
    cache = torch.zeros((4, 16, 1, 64), dtype=torch.uint8, device="cuda")
    fv.check_append_faults("cuda")
    rows = torch.ones((3, 1, 64), dtype=torch.float16, device="cuda")
    slots = torch.tensor([5, 64, 2**40], device="cuda")
    with backend.selected():
        fv.append_kv(rows, rows, cache, cache.clone(), slots, kv_dtype="fp8_e4m3")
    with pytest.raises(fv.OutOfRangeError, match="slot_mapping"):
        fv.check_append_faults("cuda")
    fv.check_append_faults("cuda")
    written = cache.view(64, 64).cpu()
    assert (written[5] == 0x38).all() and (written[:5] == 0).all() and (written[6:] == 0).all()


@ROUTES
@backends.on_cuda
def test_nothing_is_allocated_in_a_call(route: str, backend: backends.Backend) -> None:
    captured = Captured(case_of(LENGTHS[0]), backend, route)
    captured.eager()
    torch.cuda.synchronize()
    calls = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        with backend.selected():
            fv.paged_attention(
                **captured.inputs, route=route, workspace=captured.workspace, out=captured.out
            )
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == calls


@backends.on_cuda
def test_a_workspace_that_must_grow_cannot_be_captured(backend: backends.Backend) -> None:
    inputs = backends.arguments(case_of(LENGTHS[0]), "cuda")
    with backend.selected():
        fv.paged_attention(**inputs)  # loads the code
    workspace = fv.Workspace.unplanned("cuda")
    out = torch.empty_like(inputs["q"])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        backend.selected(),
        torch.cuda.graph(graph),
        pytest.raises(fv.WorkspaceTooSmallError, match="workspace: 0 bytes of fp32 state"),
    ):
        fv.paged_attention(**inputs, workspace=workspace, out=out)


@ROUTES
@backends.on_cuda
def test_a_captured_call_outlives_the_growth_of_its_workspace(
    route: str, backend: backends.Backend
) -> None:
    captured = Captured(case_of([(8, 900)]), backend, route)
    wanted = captured.replay()
    state = "half" if route in backends.HALF_ROUTES else "fp32"
    before = captured.workspace.buffers[state].address
    larger = backends.arguments(case_of([(8, 900)] * 16), "cuda")
    with backend.selected():
        fv.paged_attention(**larger, route=route, workspace=captured.workspace)
    assert captured.workspace.buffers[state].address != before
    # Whoever asks for memory now must not be given what the graph still writes to.
    others = [torch.full((2**exponent,), 7, device="cuda") for exponent in range(8, 22)]
    backends.assert_same_bits(captured.replay(), wanted, route)
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.parametrize("route", ["grouped_fp32", "scalar_fp32", "grouped_half", "scalar_half"])
@backends.on_cuda
def test_a_planned_capacity_serves_every_call_within_it(
    route: str, backend: backends.Backend
) -> None:
    """No call of up to 3 requests and 24 rows grows what was planned and allocated."""
    with backend.selected():
        workspace = fv.Workspace(
            "cuda", batch=3, rows=24, q_heads=6, kv_heads=2, head_dim=64,
            max_seq_len=CAPACITY, page_size=PAGE_SIZE, routes=[route],
        )  # fmt: skip
    workspace.allocate()
    planned = dict(workspace.state_nbytes)
    for lengths in ([(8, 900)] * 3, [(24, 500)], [(1, 900)], [(1, 5), (22, 30), (1, 900)]):
        inputs = backends.arguments(case_of(lengths), "cuda")
        with backend.selected():
            fv.paged_attention(**inputs, route=route, workspace=workspace)
    assert workspace.state_nbytes == planned


def test_a_workspace_plans_its_route_on_any_device() -> None:
    """Without a GPU too: what is missing there is a device, and no argument."""
    shape = {"batch": 2, "rows": 16, "q_heads": 6, "kv_heads": 2, "head_dim": 64}
    if not torch.cuda.is_available():
        with pytest.raises(fv.DeviceError, match="device: cuda"):
            fv.Workspace("cuda", **shape, max_seq_len=900, schedule="n16")
        with pytest.raises(fv.DeviceError, match="device: cuda"):
            fv.check_append_faults("cuda")
        return
    workspace = fv.Workspace("cuda", **shape, max_seq_len=900, schedule="n16")
    assert workspace.schedule == "n16" and workspace.nbytes > 0


@pytest.mark.parametrize("device", ["", "mps", None, 0, 1.5])
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(fv.InvalidArgumentError, match="device: "):
        fv.check_append_faults(device)  # type: ignore[arg-type]
