import math

import pytest

from tools.roofline.model import (
    CASES,
    V100,
    Case,
    Shape,
    busiest_tiles,
    choose,
    fold,
    predict,
)
from tools.roofline.sass import Kernel, Mix

VERIFY = CASES[0]
NAMES = [f"grouped_{route}_e4m3_d{d}_r{r}" for route in ("fp32", "half") for d, r in
         ((64, 8), (64, 32), (128, 8), (128, 32), (256, 8), (256, 16), (256, 48))]  # fmt: skip


def kernel(name, values_turns=1, **changes):
    shape = Shape.of(name)
    keys = Mix(shape.keys_hmma + 400, shape.keys_hmma, 0, 384, 0)
    softmax = Mix(260, 0, 72, 48, 0)
    steps = shape.values_hmma // values_turns
    values = Mix(steps + 200, steps, 0, 100, 8)
    parts = {"keys": keys, "softmax": softmax, "values": values} | changes
    return Kernel(name, 10000, **parts)


def test_products_of_a_tile_are_the_floor_of_the_tensor_cores():
    shape = Shape.of("grouped_fp32_e4m3_d256_r48")
    # 128 keys x 48 rows x 256 d, once for Q K, twice for P V, 512 a cycle.
    cycles = 3 * 128 * 48 * 256 / 512
    assert (shape.keys_hmma + shape.values_hmma) * 2 * V100.hmma_cycles == cycles
    half = Shape.of("grouped_half_e4m3_d256_r48")
    assert half.values_hmma * 2 == shape.values_hmma


def test_the_busiest_multiprocessor_has_two_splits_of_128_over_80():
    shape = Shape.of("grouped_fp32_e4m3_d256_r48")
    assert fold(VERIFY, shape, V100) == 1
    assert busiest_tiles(VERIFY, shape, V100) == 2 * 2048 // 128


def test_short_contexts_fill_only_the_first_splits():
    case = Case("", 1, 1024, 8, 6, 1, 256)
    assert busiest_tiles(case, Shape.of("grouped_fp32_e4m3_d256_r48"), V100) == 1


def test_large_batches_fold():
    case = Case("", 16, 16384, 8, 32, 8, 128)
    assert fold(case, Shape.of("grouped_fp32_e4m3_d128_r32"), V100) == 8
    many = Case("", 64, 32768, 8, 6, 1, 256)
    assert fold(many, Shape.of("grouped_fp32_e4m3_d256_r48"), V100) == 8
    assert fold(many, Shape.of("grouped_half_e4m3_d256_r48"), V100) == 1
    # Splits folded in memory stay below a whole row.
    wide = Case("", 160, 4096, 8, 6, 1, 256, splits=8)
    assert fold(wide, Shape.of("grouped_fp32_e4m3_d256_r48"), V100) == 1
    assert fold(wide, Shape.of("grouped_fp32_e4m3_d256_r16"), V100) == 8


def test_a_prediction_lies_above_every_bound():
    for turns in (1, 4):
        p = predict(VERIFY, kernel("grouped_fp32_e4m3_d256_r48", turns))
        assert p.predicted_us > max(p.dram_us, p.hmma_us, p.shared_us, p.issue_us)
        assert math.isclose(p.dram_us, 2 * 262144 * 256 / 900e3)


def test_memory_limits_a_single_row():
    case = CASES[1]
    small = kernel("grouped_fp32_e4m3_d256_r8")
    assert predict(case, small).limit == "memory"
    slow = kernel("grouped_fp32_e4m3_d256_r8", softmax=Mix(20000, 0, 72, 48, 0))
    assert predict(case, slow).limit == "tiles"


def test_code_of_another_shape_is_refused():
    wrong = kernel("grouped_fp32_e4m3_d256_r48", keys=Mix(100, 50, 0, 0, 0))
    with pytest.raises(ValueError, match="grouped_fp32_e4m3_d256_r48: 50"):
        predict(VERIFY, wrong)
    with pytest.raises(ValueError, match="not the name"):
        Shape.of("scalar_fp32_e4m3")


def test_the_least_kernel_that_fits_is_chosen():
    assert choose(VERIFY, NAMES, "fp32") == "grouped_fp32_e4m3_d256_r48"
    assert choose(CASES[1], NAMES, "half") == "grouped_half_e4m3_d256_r8"
    assert choose(Case("", 1, 1, 1, 4, 1, 80), NAMES, "fp32") == "grouped_fp32_e4m3_d128_r8"
    assert choose(Case("", 1, 1, 32, 6, 1, 64), NAMES, "fp32") == "grouped_fp32_e4m3_d64_r32"
    with pytest.raises(ValueError, match="head_dim 512"):
        choose(Case("wide", 1, 1, 1, 1, 1, 512), NAMES, "fp32")
