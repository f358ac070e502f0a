"""Linear layers that compute two rows where one is asked for."""

import pytest
import torch

import flashverify as fv
from flashverify.integrations.row_invariant_linear import RowInvariantLinears, with_two_rows


class Recorder:
    """A linear map that notes the shapes it is given."""

    def __init__(self):
        self.shapes = []

    def __call__(self, x):
        self.shapes.append(tuple(x.shape))
        return 2 * x[..., :3]


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        ((5,), (2, 5)),
        ((1, 5), (2, 5)),
        ((1, 1, 5), (2, 5)),
        ((2, 5), (2, 5)),
        ((1, 3, 5), (1, 3, 5)),
        ((0, 5), (0, 5)),
    ],
)
def test_one_row_is_computed_as_two(given, computed):
    linear, x = Recorder(), torch.randn(given)
    out = with_two_rows(linear, x)
    assert linear.shapes == [computed]
    assert torch.equal(out, 2 * x[..., :3])


def test_a_row_of_one_feature_is_one_row():
    linear = Recorder()
    assert with_two_rows(linear, torch.randn(1, 1)).shape == (1, 1)
    assert linear.shapes == [(2, 1)]


def small_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = (torch.nn.Linear(4096, 1024), torch.nn.SiLU(), torch.nn.Linear(1024, 8))
    return torch.nn.Sequential(*layers).to(dtype)


def test_rows_do_not_depend_on_their_number():
    model, x = small_model(), torch.randn(40, 4096, dtype=torch.bfloat16)
    with torch.inference_mode(), RowInvariantLinears(model):
        whole = model(x)
        for start in range(40):
            for rows in (1, 2, 8):
                part = model(x[start : start + rows])
                assert torch.equal(part, whole[start : start + rows]), (start, rows)


def test_the_model_is_changed_and_changed_back():
    model, x = small_model(), torch.randn(1, 4096, dtype=torch.bfloat16)
    seen = []
    model[0].register_forward_hook(lambda _module, _args, out: seen.append(out.shape))
    with RowInvariantLinears(model) as changed:
        assert changed.names == ("0", "2")
        assert all("forward" in vars(model[index]) for index in (0, 2))
        assert model(x).shape == (1, 8)
        with pytest.raises(fv.InvalidArgumentError, match=r"0\.forward was replaced already"):
            RowInvariantLinears(model)
    changed.restore()
    assert not any("forward" in vars(module) for module in model.modules())
    assert seen == [(1, 1024)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_refused_and_nothing_is_changed(dtype):
    model = small_model()
    model[2].to(dtype)
    with pytest.raises(fv.UnsupportedError, match=r"2\.weight of float.*accepted: bfloat16"):
        RowInvariantLinears(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_devices_are_refused():
    with pytest.raises(fv.UnsupportedError, match=r"0\.weight on meta; accepted: cpu"):
        RowInvariantLinears(small_model().to("meta"))


def test_a_model_without_linears_is_refused():
    with pytest.raises(fv.InvalidArgumentError, match=r"SiLU without a torch\.nn\.Linear"):
        RowInvariantLinears(torch.nn.SiLU())
