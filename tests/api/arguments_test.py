"""Every argument, given wrongly: a typed error in words, and untouched outputs.

Each message names the argument, shows the value found and says what is accepted.
"""

import decimal
import fractions
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import flashverify as fv
from tests.support import cases

INVALID, RANGE, UNSUPPORTED = fv.InvalidArgumentError, fv.OutOfRangeError, fv.UnsupportedError
NAN, INF = math.nan, math.inf

Bad = tuple[str, Any, type[Exception], str]


def attention_arguments() -> dict[str, Any]:
    """Two requests of two rows each; 12 and 30 keys in pages of 16."""
    requests = [
        cases.random_request(seed, q_len=2, seq_len=seq_len, q_heads=4, kv_heads=2)
        for seed, seq_len in enumerate((12, 30))
    ]
    case = cases.paged(requests)
    return {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "page_table": case.page_table,
        "seq_lens": case.seq_lens,
    }


def append_arguments() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = torch.zeros(2, 3, 16, 2, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {
        "key": torch.randn(3, 2, 64, generator=generator),
        "value": torch.randn(3, 2, 64, generator=generator),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.tensor([5, -1, 47]),
    }


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, with every second element of twice the last axis."""
    return torch.cat((tensor, tensor), dim=-1)[..., ::2]


NOT_TENSORS: tuple[Any, ...] = ([[1.0]], "q", 1.5, object(), torch.float32)

ATTENTION: list[Bad] = [
    # What is no tensor at all.
    *(
        (name, value, INVALID, f"{type(value).__name__}; accepted: a torch.Tensor")
        for name in ("q", "k_cache", "v_cache", "page_table", "seq_lens", "sinks", "out")
        for value in NOT_TENSORS
    ),
    *((name, None, INVALID, "NoneType") for name in ("q", "k_cache", "page_table", "seq_lens")),
    ("query_start_loc", [0, 2, 4], INVALID, "list; accepted: a torch.Tensor, int32 [batch + 1]"),
    # Ranks.
    ("q", zeros(4, 256), INVALID, "shape [4, 256]; accepted: rank 3"),
    ("q", zeros(1, 4, 4, 64), INVALID, "accepted: rank 3 [rows, q_heads, head_dim]"),
    ("q", zeros(1, 1, 4, 4, 64), INVALID, "accepted: rank 3"),
    ("k_cache", fp8(6, 16, 128), INVALID, "accepted: rank 4"),
    ("v_cache", fp8(6, 16, 128), INVALID, "rank 3"),
    ("v_cache", fp8(1, 6, 16, 2, 64), INVALID, "rank 5"),
    ("page_table", int32(0, 1), INVALID, "rank 1; accepted: 2"),
    ("seq_lens", int32(12, 30)[:, None], INVALID, "rank 2; accepted: 1"),
    ("seq_lens", torch.tensor(12, dtype=torch.int32), INVALID, "accepted: rank 1 [batch]"),
    ("query_start_loc", int32(0, 2, 4)[None], INVALID, "rank 2; accepted: 1"),
    ("sinks", torch.zeros(4, 1), INVALID, "rank 2; accepted: 1"),
    ("out", zeros(4, 256), INVALID, "rank 2; accepted: 3"),
    # Dtypes.
    ("q", zeros(4, 4, 64, dtype=torch.float64), INVALID, "dtype float64; accepted: float32"),
    ("q", zeros(4, 4, 64, dtype=torch.int32), INVALID, "dtype int32"),
    ("q", fp8(4, 4, 64), INVALID, "dtype float8_e4m3fn"),
    ("q", zeros(4, 4, 64, dtype=torch.complex64), INVALID, "dtype complex64"),
    ("q", zeros(4, 4, 64, dtype=torch.bool), INVALID, "dtype bool"),
    ("k_cache", zeros(6, 16, 2, 64, dtype=torch.float32), UNSUPPORTED, "float32"),
    ("k_cache", zeros(6, 16, 2, 64, dtype=torch.uint8), INVALID, "and k_cache is uint8"),
    ("k_cache", zeros(6, 16, 2, 64, dtype=torch.int8), UNSUPPORTED, "int8"),
    ("k_cache", fp8(6, 16, 2, 64).view(torch.float8_e5m2), INVALID, "v_cache: dtype"),
    ("v_cache", zeros(6, 16, 2, 64), INVALID, "dtype float16; accepted: the dtype of k_"),
    ("v_cache", zeros(5, 16, 2, 64, dtype=torch.uint8), INVALID, "dtype uint8"),
    ("v_cache", fp8(5, 16, 2, 64).view(torch.float8_e5m2), INVALID, "dtype float8_e5m2"),
    ("v_cache", zeros(6, 16, 2, 64, dtype=torch.uint16), INVALID, "dtype uint16"),
    ("page_table", torch.zeros(2, 4), INVALID, "dtype float32; accepted: int32"),
    ("page_table", torch.zeros(2, 4, dtype=torch.int64), INVALID, "dtype int64; accepted: int32"),
    ("seq_lens", torch.tensor([12, 30]), INVALID, "dtype int64; accepted: int32"),
    ("seq_lens", torch.tensor([12.0, 30.0]), INVALID, "dtype float32"),
    ("query_start_loc", torch.tensor([0, 2, 4]), INVALID, "dtype int64; accepted: int32"),
    ("sinks", torch.zeros(4, dtype=torch.float16), INVALID, "dtype float16; accepted: float32"),
    ("out", zeros(4, 4, 64, dtype=torch.float64), INVALID, "dtype float64"),
    ("out", fp8(4, 4, 64), INVALID, "dtype float8_e4m3fn; accepted: float32, float16"),
    ("k_dequant_scale", zeros(1), INVALID, "dtype float16; accepted: float32"),
    ("v_dequant_scale", torch.ones(1, dtype=torch.float64), INVALID, "dtype float64"),
    # Shapes.
    ("q", zeros(4, 3, 64), INVALID, "has 3 elements; accepted: multiples of 2 (kv_heads"),
    ("q", zeros(4, 0, 64), INVALID, "has 0 elements"),
    ("q", zeros(4, 4, 80), INVALID, "80 elements; accepted: 64 (head_dim of k_cache)"),
    ("q", zeros(3, 4, 64), INVALID, "3 rows for a batch of 2"),
    ("q", zeros(4, 4, 0), UNSUPPORTED, "head_dim: 0"),
    ("q", zeros(130, 4, 64), UNSUPPORTED, "q_len: 65"),
    ("k_cache", fp8(6, 0, 2, 64), UNSUPPORTED, "page_size: 0; accepted: 1..65536"),
    ("k_cache", fp8(6, 16, 0, 64), INVALID, "shape [6, 16, 0, 64]; accepted: 1 or more kv_heads"),
    ("k_cache", fp8(1, 65537, 1, 64), UNSUPPORTED, "page_size: 65537"),
    ("v_cache", fp8(6, 16, 2, 64), INVALID, "axis 0 has 6 elements"),
    ("v_cache", fp8(5, 8, 2, 64), INVALID, "axis 1 has 8 elements"),
    ("v_cache", fp8(5, 16, 1, 64), INVALID, "axis 2 has 1 elements"),
    ("v_cache", fp8(5, 16, 2, 32), INVALID, "axis 3 has 32 elements"),
    ("page_table", zeros(3, 4, dtype=torch.int32), INVALID, "seq_lens: axis 0 has 2 elements"),
    ("seq_lens", int32(12), INVALID, "axis 0 has 1 elements; accepted: 2 (batch of page_table)"),
    ("query_start_loc", int32(0, 4), INVALID, "2 elements; accepted: 3 (batch + 1)"),
    ("sinks", torch.zeros(3), INVALID, "3 elements; accepted: 4 (q_heads of q)"),
    ("out", zeros(3, 4, 64), INVALID, "axis 0 has 3 elements; accepted: 4 (rows of q)"),
    ("out", zeros(4, 2, 64), INVALID, "axis 1 has 2 elements; accepted: 4 (q_heads of q)"),
    ("out", zeros(4, 4, 32), INVALID, "axis 2 has 32 elements; accepted: 64 (head_dim of q)"),
    ("k_dequant_scale", torch.ones(3), INVALID, "3 elements; accepted: 1 or 2 (kv_heads)"),
    ("v_dequant_scale", torch.ones(0), INVALID, "0 elements; accepted: 1 or 2 (kv_heads)"),
    # Strides.
    ("q", every_second(zeros(4, 4, 64)), INVALID, "stride 2; accepted: 1"),
    ("k_cache", every_second(fp8(6, 16, 2, 64)), INVALID, "stride 2; accepted: 1"),
    ("v_cache", every_second(fp8(6, 16, 2, 64)), INVALID, "stride 2; accepted: 1"),
    ("page_table", every_second(zeros(2, 4, dtype=torch.int32)), INVALID, "stride 2"),
    ("seq_lens", every_second(int32(12, 30)), INVALID, "stride 2; accepted: 1"),
    ("out", every_second(zeros(4, 4, 64)), INVALID, "stride 2; accepted: 1"),
    ("out", zeros(1, 4, 64).expand(4, 4, 64), INVALID, "overlaps itself"),
    ("sinks", torch.zeros(8)[::2], INVALID, "stride 2; accepted: 1"),
    ("k_dequant_scale", torch.ones(4)[::2], INVALID, "stride 2; accepted: 1"),
    # Values in tensors.
    ("seq_lens", int32(12, -1), RANGE, "element 1 is -1; accepted: 0 to 64"),
    ("seq_lens", int32(12, 65), RANGE, "element 1 is 65; accepted: 0 to 64"),
    ("page_table", int32(0, 0, 0, 0, 1, 6, 0, 0).view(2, 4), RANGE, "[1, 1] is 6; accepted: 0 to"),
    ("page_table", int32(-1, 0, 0, 0, 1, 2, 0, 0).view(2, 4), RANGE, "[0, 0] is -1; accepted: 0"),
    ("query_start_loc", int32(1, 2, 4), RANGE, "element 0 is 1; accepted: 0"),
    ("query_start_loc", int32(0, 5, 4), RANGE, "element 2 is 4; accepted: 5"),
    ("query_start_loc", int32(0, 2, 3), RANGE, "is 3; accepted: 4 (rows of q)"),
    ("query_start_loc", int32(0, 2, -(2**31)), RANGE, "-2147483648"),
    ("sinks", torch.tensor([0.0, NAN, 0.0, 0.0]), INVALID, "element 1 is nan"),
    ("sinks", torch.tensor([0.0, 0.0, INF, 0.0]), INVALID, "element 2 is inf"),
    *(
        (name, value, INVALID, found)
        for name in ("k_dequant_scale", "v_dequant_scale")
        for value, found in (
            (torch.tensor(NAN), "element 0 is nan"),
            (torch.tensor([1.0, -1.0]), "element 1 is -1"),
            (torch.zeros(1), "element 0 is 0"),
            (NAN, "nan"),
            (INF, "inf"),
            (0.0, "0"),
            (-0.0, "-0"),
            (-2, "-2"),
            (1e39, "1e+39; accepted: a float32 value"),
            (10**400, "accepted: a float32 value"),
            (1e-60, "0; accepted: finite values above 0"),
            (True, "bool; accepted: a torch.Tensor, None, a number"),
            ("1.0", "str; accepted: a torch.Tensor, None, a number"),
            (1j, "complex; accepted: a torch.Tensor, None, a number"),
            ([1.0], "list; accepted: a torch.Tensor, None, a number"),
        )
    ),
    # Plain values.
    *(
        (name, value, INVALID, f"{value!r}; accepted: a number")
        for name in ("scale", "softcap")
        for value in ("1", True, [1.0], torch.tensor(1.0), 1j)
    ),
    ("softcap", None, INVALID, "None; accepted: a number"),
    ("scale", NAN, INVALID, "nan; accepted: finite values"),
    ("scale", INF, INVALID, "inf; accepted: finite values"),
    ("scale", 1e300, INVALID, "1e+300; accepted: a float32 value"),
    ("scale", 10**400, INVALID, "accepted: a float32 value"),
    ("softcap", -1.0, INVALID, "-1; accepted: finite values above 0, or 0"),
    ("softcap", NAN, INVALID, "nan"),
    ("softcap", INF, INVALID, "inf"),
    *(
        ("window", value, INVALID, f"{value!r}; accepted: None, or an int")
        for value in (1.0, "1", True, [1], torch.tensor(1))
    ),
    ("window", 0, RANGE, "0; accepted: 1 to"),
    ("window", -5, RANGE, "-5; accepted: 1 to"),
    ("window", 2**63, RANGE, f"{2**63}; accepted: 1 to"),
    *(
        (name, value, INVALID, f"{value!r}; accepted: True or False")
        for name in ("causal", "return_lse")
        for value in (1, 0, None, "yes", 2.0)
    ),
    ("route", "grouped", INVALID, "'grouped'; accepted: grouped_fp32, scalar_fp32"),
    ("route", "GROUPED_FP32", INVALID, "accepted: grouped_fp32"),
    ("route", 1, INVALID, "1; accepted: grouped_fp32"),
    ("route", ["grouped_fp32"], INVALID, "accepted: grouped_fp32"),
    ("route", "xqa_half", UNSUPPORTED, "q_len: 2 with xqa_half on cpu; accepted: 0..1"),
    ("kv_dtype", "fp9", INVALID, "'fp9'; accepted: None, fp8"),
    ("kv_dtype", "fp8_e5m2", INVALID, "'fp8_e5m2', and k_cache is float8_e4m3fn"),
    ("kv_dtype", torch.float8_e4m3fn, INVALID, "torch.float8_e4m3fn; accepted: None, fp8"),
    ("kv_dtype", 4, INVALID, "4; accepted: None, fp8"),
    ("kv_dtype", ["fp8"], INVALID, "accepted: None, fp8"),
    ("workspace", b"bytes", INVALID, "bytes; accepted: None or a Workspace"),
    ("workspace", zeros(1 << 20), INVALID, "Tensor; accepted: None or a Workspace"),
    # Devices and layouts that hold no memory the library could use.
    ("q", torch.zeros(4, 4, 64, device="meta"), UNSUPPORTED, "meta"),
    ("k_cache", torch.zeros(6, 16, 2, 64, device="meta", dtype=torch.float16), INVALID, "meta"),
    ("seq_lens", torch.zeros(2, device="meta", dtype=torch.int32), INVALID, "meta"),
    ("out", torch.zeros(4, 4, 64, device="meta"), INVALID, "meta"),
    ("page_table", zeros(2, 4, dtype=torch.int32).to_sparse(), INVALID, "strided tensor"),
    ("sinks", torch.zeros(4).to_sparse(), INVALID, "strided tensor"),
]

APPEND: list[Bad] = [
    *(
        (name, value, INVALID, f"{type(value).__name__}; accepted: a torch.Tensor")
        for name in ("key", "value", "k_cache", "v_cache", "slot_mapping")
        for value in (*NOT_TENSORS, None)
    ),
    ("key", zeros(3, 128), INVALID, "rank 2; accepted: 3"),
    ("value", zeros(3, 2, 64, 1, 1), INVALID, "rank 5"),
    ("k_cache", fp8(3, 16, 128), INVALID, "rank 3; accepted: 4"),
    ("slot_mapping", torch.tensor(0), INVALID, "rank 0; accepted: 1"),
    ("slot_mapping", torch.zeros(3, 1, dtype=torch.int64), INVALID, "rank 2; accepted: 1"),
    ("key", torch.zeros(3, 2, 64, dtype=torch.float64), INVALID, "dtype float64"),
    ("key", fp8(3, 2, 64), INVALID, "dtype float8_e4m3fn; accepted: float32, float16 or bfloat16"),
    ("value", zeros(3, 2, 64), INVALID, "dtype float16; accepted: float32 (dtype of key)"),
    ("k_cache", torch.zeros(3, 16, 2, 64), UNSUPPORTED, "float32"),
    ("k_cache", torch.zeros(3, 16, 2, 64, dtype=torch.uint8), INVALID, "and k_cache is uint8"),
    ("v_cache", zeros(3, 16, 2, 64), INVALID, "dtype float16; accepted: the dtype of k_"),
    ("v_cache", zeros(3, 16, 2, 64, dtype=torch.uint8), INVALID, "dtype uint8"),
    ("slot_mapping", torch.zeros(3), INVALID, "dtype float32; accepted: int32 or int64"),
    ("slot_mapping", torch.zeros(3, dtype=torch.int16), INVALID, "dtype int16"),
    ("key", torch.zeros(3, 1, 64), INVALID, "axis 1 has 1 elements; accepted: 2 (kv_heads"),
    ("key", torch.zeros(3, 2, 32), INVALID, "axis 2 has 32 elements; accepted: 64 (head_dim"),
    ("value", torch.zeros(2, 2, 64), INVALID, "axis 0 has 2 elements; accepted: 3 (tokens"),
    ("value", torch.zeros(3, 2, 32), INVALID, "axis 2 has 32 elements; accepted: 64 (head_dim"),
    ("v_cache", fp8(2, 16, 2, 64), INVALID, "axis 0 has 2 elements"),
    ("slot_mapping", torch.tensor([1, 2]), INVALID, "axis 0 has 2 elements; accepted: 3 (tokens"),
    ("key", every_second(torch.zeros(3, 2, 64)), INVALID, "stride 2; accepted: 1"),
    ("k_cache", every_second(fp8(3, 16, 2, 64)), INVALID, "stride 2; accepted: 1"),
    ("k_cache", fp8(1, 16, 2, 64).expand(3, 16, 2, 64), INVALID, "overlaps itself"),
    ("slot_mapping", torch.tensor([0, 1, 48]), RANGE, "element 2 is 48; accepted: less than 48"),
    ("slot_mapping", torch.tensor([0, 1, 2**62]), RANGE, f"element 2 is {2**62}"),
    ("slot_mapping", torch.tensor([7, 1, 7]), INVALID, "elements 0 and 2 are both 7"),
    ("k_dequant_scale", torch.ones(3), INVALID, "3 elements; accepted: 1 or 2 (kv_heads)"),
    ("k_dequant_scale", NAN, INVALID, "nan"),
    ("v_dequant_scale", 0, INVALID, "0; accepted: finite values above 0"),
    ("v_dequant_scale", True, INVALID, "bool; accepted: a torch.Tensor, None, a number"),
    ("kv_dtype", "fp8_e5m2", INVALID, "and k_cache is float8_e4m3fn"),
    ("kv_dtype", 4, INVALID, "4; accepted: None, fp8"),
    ("kv_dtype", [], INVALID, "accepted: None, fp8"),
    ("key", torch.zeros(3, 2, 64, device="meta"), INVALID, "meta"),
    ("v_cache", torch.zeros(3, 16, 2, 64, device="meta", dtype=torch.float16), INVALID, "meta"),
]


def names_of(cases_of_bad: Sequence[Bad]) -> list[str]:
    """Numbered, so that two tensors of one shape and dtype have names of their own."""
    names = []
    for number, (argument, value, _, _) in enumerate(cases_of_bad):
        tensor = isinstance(value, torch.Tensor)
        what = f"{list(value.shape)}-{value.dtype}" if tensor else f"{value!r:.20}"
        names.append(f"{number}-{argument}-{what}")
    return names


def assert_message(error: Exception, argument: str, words: str) -> None:
    message = str(error)
    assert words in message, message
    assert argument in message, message
    assert "; accepted: " in message, message


def snapshot(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: cases.bits(value).clone()
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_sparse
    }


def assert_refused(
    call: Callable[..., object], arguments: dict[str, Any], bad: Bad, *written: str
) -> None:
    name, value, error, words = bad
    arguments[name] = value
    before = snapshot(arguments)
    with pytest.raises(error) as caught:
        call(**arguments)
    assert isinstance(caught.value, fv.FlashVerifyError)
    assert_message(caught.value, name, words)
    after = snapshot(arguments)
    for written_name in written:
        if written_name in before:
            assert torch.equal(before[written_name], after[written_name]), written_name


@pytest.mark.parametrize("bad", ATTENTION, ids=names_of(ATTENTION))
def test_attention(bad: Bad) -> None:
    arguments = attention_arguments()
    arguments["out"] = cases.poisoned_storage(torch.float16, 4, 4, 64)
    assert_refused(fv.paged_attention, arguments, bad, "out")


@pytest.mark.parametrize("bad", APPEND, ids=names_of(APPEND))
def test_append(bad: Bad) -> None:
    assert_refused(fv.append_kv, append_arguments(), bad, "k_cache", "v_cache")


MERGE: list[Bad] = [
    *(
        (name, value, INVALID, f"{type(value).__name__}; accepted: a torch.Tensor")
        for name in ("outs", "lses")
        for value in (*NOT_TENSORS, None)
    ),
    ("outs", torch.zeros(2, 3, 64), INVALID, "shape [2, 3, 64]; accepted: rank 4"),
    ("lses", torch.zeros(2, 3, 4, 1), INVALID, "accepted: rank 3"),
    ("outs", torch.zeros(0, 3, 4, 64), INVALID, "axis 0 (states) has 0 elements"),
    ("outs", torch.zeros(2, 3, 0, 64), INVALID, "axis 2 (heads) has 0 elements"),
    ("outs", torch.zeros(2, 3, 4, 0), INVALID, "axis 3 (head_dim) has 0 elements"),
    ("outs", torch.zeros(2, 3, 5, 64), INVALID, "lses: axis 2 has 4 elements; accepted: 5"),
    ("lses", torch.zeros(3, 3, 4), INVALID, "axis 0 has 3 elements; accepted: 2"),
    ("outs", zeros(2, 3, 4, 64), INVALID, "dtype float16; accepted: float32"),
    ("outs", torch.zeros(2, 3, 4, 64).double(), INVALID, "dtype float64"),
    ("lses", zeros(2, 3, 4), INVALID, "dtype float16; accepted: float32"),
    ("outs", every_second(torch.zeros(2, 3, 4, 64)), INVALID, "stride 2; accepted: 1"),
    ("outs", torch.zeros(2, 3, 4, 64, device="meta"), INVALID, "meta"),
]


@pytest.mark.parametrize("bad", MERGE, ids=names_of(MERGE))
def test_merge(bad: Bad) -> None:
    arguments = {"outs": torch.zeros(2, 3, 4, 64), "lses": torch.zeros(2, 3, 4)}
    assert_refused(fv.merge_states, arguments, bad)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "page_table", "seq_lens"])
def test_output_over_an_input(name: str) -> None:
    """The output may not share a byte with anything that is read."""
    arguments = attention_arguments()
    if name.endswith("cache"):  # of the output's dtype, so that it can be a part of it
        for cache in ("k_cache", "v_cache"):
            arguments[cache] = arguments[cache].to(torch.float32).to(torch.float16)
    source = arguments[name]
    if source.dtype == torch.int32:
        storage = torch.zeros(4 * 4 * 64, dtype=torch.float16)
        arguments[name] = storage.view(torch.int32)[: source.numel()].view(source.shape)
        arguments[name].copy_(torch.where((source >= 0) & (source < 64), source, 0))
        out = storage.view(4, 4, 64)
    else:
        out = source.reshape(-1)[: 4 * 4 * 64].view(4, 4, 64)
    before = snapshot(arguments)
    with pytest.raises(INVALID, match=f"out: overlaps {name} in memory"):
        fv.paged_attention(**arguments, out=out)
    for argument, bits in snapshot(arguments).items():
        assert torch.equal(bits, before[argument])


def test_caches_over_each_other() -> None:
    arguments = append_arguments()
    arguments["v_cache"] = arguments["k_cache"]
    with pytest.raises(INVALID, match="k_cache: overlaps v_cache in memory"):
        fv.append_kv(**arguments)
    arguments = append_arguments()
    arguments["key"] = arguments["k_cache"].view(torch.float32)[:1, :3].expand(1, 3, 2, 16)[0]
    with pytest.raises(INVALID, match="key"):
        fv.append_kv(**arguments)


def test_a_failure_in_the_middle_writes_nothing() -> None:
    """The last token is out of range: the first ones must not have been written."""
    arguments = append_arguments()
    arguments["slot_mapping"] = torch.tensor([0, 1, 10_000])
    before = snapshot(arguments)
    with pytest.raises(RANGE, match="slot_mapping: element 2 is 10000"):
        fv.append_kv(**arguments)
    after = snapshot(arguments)
    assert torch.equal(before["k_cache"], after["k_cache"])
    assert torch.equal(before["v_cache"], after["v_cache"])


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (fv.InvalidArgumentError, ValueError),
        (fv.OutOfRangeError, IndexError),
        (fv.UnsupportedError, ValueError),
        (fv.WorkspaceTooSmallError, ValueError),
        (fv.OutOfMemoryError, MemoryError),
        (fv.DeviceError, RuntimeError),
        (fv.InternalError, RuntimeError),
        (fv.RouteError, RuntimeError),
        (fv.StaleNativeLibraryError, ImportError),
    ],
)
def test_each_error_is_a_builtin_one_too(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin) and issubclass(error, fv.FlashVerifyError)


def test_positional_options_are_refused() -> None:
    arguments = attention_arguments()
    with pytest.raises(TypeError, match="positional"):
        fv.paged_attention(*arguments.values(), None)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'kv_scale'"):
        fv.paged_attention(**arguments, kv_scale=1.0)


def test_softcap_that_float32_has_not() -> None:
    """It would underflow to 0, which means none: the opposite of what was asked."""
    with pytest.raises(fv.InvalidArgumentError, match=r"softcap: 1e-50; accepted: 0 for none"):
        fv.paged_attention(**attention_arguments() | {"softcap": 1e-50})


@pytest.mark.parametrize("name", ["q", "v_cache", "out"])
def test_attention_of_negated_views(name: str) -> None:
    """torch's negative bit does not travel through DLPack: the sign would be lost."""
    arguments = attention_arguments()
    arguments["out"] = torch.zeros(4, 4, 64)
    arguments[name] = torch._neg_view(torch.zeros(arguments[name].shape, dtype=torch.float16))
    if name == "v_cache":
        arguments["k_cache"] = torch.zeros(arguments["v_cache"].shape, dtype=torch.float16)
    with pytest.raises(fv.InvalidArgumentError, match=f"{name}: .*negative bit; accepted: "):
        fv.paged_attention(**arguments)


def test_append_of_negated_views() -> None:
    arguments = append_arguments()
    arguments["key"] = torch._neg_view(arguments["key"])
    with pytest.raises(fv.InvalidArgumentError, match=r"key: .*negative bit; accepted: "):
        fv.append_kv(**arguments)
    arguments = append_arguments() | {"k_dequant_scale": torch._neg_view(torch.ones(1))}
    with pytest.raises(
        fv.InvalidArgumentError, match=r"k_dequant_scale: .*negative bit; accepted: "
    ):
        fv.append_kv(**arguments)


def test_sparse_query() -> None:
    arguments = attention_arguments()
    arguments["q"] = arguments["q"].to_sparse()
    with pytest.raises(fv.InvalidArgumentError, match=r"q: .*; accepted: "):
        fv.paged_attention(**arguments)


class RealNumber:
    """A real number of another package, as NumPy's scalars are."""

    def __float__(self) -> float:
        return 0.5


numbers.Real.register(RealNumber)


@pytest.mark.parametrize("number", [RealNumber(), fractions.Fraction(1, 2), 2])
def test_scales_may_be_any_real_number(number: Any) -> None:
    plain = append_arguments() | {"k_dequant_scale": float(number)}
    fv.append_kv(**plain)
    arguments = append_arguments() | {"k_dequant_scale": number}
    fv.append_kv(**arguments)
    assert torch.equal(arguments["k_cache"].view(torch.uint8), plain["k_cache"].view(torch.uint8))
    query = attention_arguments()
    expected = fv.paged_attention(**query | {"v_dequant_scale": float(number)})
    assert torch.equal(fv.paged_attention(**query | {"v_dequant_scale": number}), expected)


@pytest.mark.parametrize("value", [True, "1", [1.0], 1j, decimal.Decimal(1)])
def test_scales_that_are_no_numbers(value: object) -> None:
    with pytest.raises(fv.InvalidArgumentError, match="k_dequant_scale: "):
        fv.append_kv(**append_arguments() | {"k_dequant_scale": value})


@pytest.mark.parametrize("name", ["scale", "causal", "window", "softcap", "kv_dtype", "route"])
def test_a_tensor_in_the_place_of_something_else(name: str) -> None:
    """Its elements would fill a screen."""
    with pytest.raises(fv.InvalidArgumentError) as error:
        fv.paged_attention(**attention_arguments() | {name: torch.zeros(9, 9, 9)})
    assert str(error.value).startswith(f"{name}: ")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
