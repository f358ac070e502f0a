"""The example does what it says: drafts change nothing but the number of steps."""

import random

import pytest
import torch

from docs.examples import verify_loop

on_every_device = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(
                not torch.cuda.is_available(), reason="torch sees no CUDA device"
            ),
        ),
    ],
)


@on_every_device
def test_the_example_runs(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    verify_loop.main(device)
    assert "equal to the bit" in capsys.readouterr().out


@on_every_device
@pytest.mark.parametrize("drafts", [1, 3, 7, 31])
def test_drafts_change_no_bit(drafts: int, device: str) -> None:
    model = verify_loop.ToyModel(device)
    rng = random.Random(drafts)
    # A prompt of several chunks, one of a page exactly, one of a single token.
    prompts = [[rng.randrange(verify_loop.VOCAB) for _ in range(n)] for n in (70, 16, 1)]
    plain, plain_logits, *none = verify_loop.decode(model, prompts, 40, 0, device)
    assert none == [0, 0]
    texts, logits, proposed, accepted = verify_loop.decode(model, prompts, 40, drafts, device)
    assert [len(text) for text in texts] == [110, 56, 41]
    assert texts == plain
    for ours, theirs in zip(logits, plain_logits, strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    # Both branches ran: drafts that were kept, and drafts that were taken back.
    assert 0 < accepted < proposed


def test_a_request_alone_and_beside_another() -> None:
    """One request alone gives the logits that it gives beside another."""
    model = verify_loop.ToyModel("cpu")
    together = verify_loop.decode(model, [[5, 9, 5, 9], [7]], 24, 7, "cpu")
    alone = verify_loop.decode(model, [[5, 9, 5, 9]], 24, 3, "cpu")
    assert together[0][0] == alone[0][0]
    assert torch.equal(together[1][0].view(torch.int32), alone[1][0].view(torch.int32))
