"""Every schedule is right, and gives a verified row the bits of its decode."""

import pytest
import torch

import flashverify as fv
from tests.support import backends, cases, tolerances

SCHEDULES = [f"n{2**k}" for k in range(8)]


def attend(
    case: cases.Case, backend: backends.Backend, route: str, schedule: str
) -> backends.Result:
    with backend.selected():
        out, lse = fv.paged_attention(
            **backends.arguments(case, "cuda"),
            route=route,
            workspace=fv.Workspace.unplanned("cuda", schedule=schedule),
            out=torch.full(case.q.shape, float("nan"), dtype=torch.float32, device="cuda"),
            return_lse=True,
        )
    return backends.Result(out.cpu(), lse.cpu())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("route", backends.FP32_ROUTES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@backends.on_cuda
def test_a_batch_of_any_size(
    head_dim: int, route: str, schedule: str, backend: backends.Backend
) -> None:
    """Alone, among 8 and among 64 requests: folds differ with the batch, and no bit does."""
    block = cases.random_request(1, q_len=8, seq_len=2900, q_heads=6, head_dim=head_dim)
    other = cases.random_request(2, q_len=8, seq_len=130, q_heads=6, head_dim=head_dim)
    expected = tolerances.expected(cases.paged([block], page_size=80))
    alone = attend(cases.paged([block], page_size=80), backend, route, schedule)
    expected.check(alone.out, alone.lse, what=f"{route} {schedule}")
    for batch in (8, 64):
        case = cases.paged([*[other] * (batch - 1), block], page_size=80)
        result = attend(case, backend, route, schedule)
        mine = backends.Result(result.out[-8:], result.lse[-8:])
        backends.assert_same_bits(mine, alone, f"batch {batch}")
    decode = attend(cases.paged(block.decode_steps(), page_size=16), backend, route, schedule)
    backends.assert_same_bits(decode, alone, "decode")


@pytest.mark.parametrize("schedule", ["n3", "n256", "c1024", "", 128])
@backends.on_cuda
def test_unknown_schedules_are_refused(schedule: object, backend: backends.Backend) -> None:
    with backend.selected(), pytest.raises(fv.InvalidArgumentError, match=r"schedule: .*n128"):
        fv.Workspace.unplanned("cuda", schedule=schedule)  # type: ignore[arg-type]


def test_the_cpu_has_one_schedule() -> None:
    assert fv.Workspace.unplanned("cpu").schedule == "c1024"
    assert fv.Workspace.unplanned("cpu", schedule="c1024").splits == 0
    with pytest.raises(fv.InvalidArgumentError, match=r"schedule: 'n128'; accepted: None, c1024"):
        fv.Workspace.unplanned("cpu", schedule="n128")
