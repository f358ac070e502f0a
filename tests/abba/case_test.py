import dataclasses

import pytest

from flashverify.abba.case import Case, available_memory_bytes, format_bytes
from flashverify.abba.outcome import UsageError


def test_the_default_case_is_the_seeds_experiment():
    case = Case()
    case.check()
    assert dataclasses.asdict(case) == {
        "context": 262144,
        "q_len": 8,
        "q_heads": 6,
        "kv_heads": 1,
        "head_dim": 256,
        "page_size": 3296,
        "batch": 1,
        "kv_dtype": "e4m3",
    }
    assert case.kv_live_bytes == 2 * 262144 * 256
    assert case.pages_per_request == 80
    assert case.kv_allocated_bytes == 2 * 80 * 3296 * 256
    assert case.softmax_scale == 1 / 16
    assert case.flops == 4 * 6 * 256 * sum(262144 - 7 + row for row in range(8))


def test_rows_that_see_nothing_cost_nothing():
    case = Case(context=2, q_len=5, q_heads=1, head_dim=64)
    assert case.visible_keys_per_request == 1 + 2
    assert case.flops == 4 * 3 * 64


def test_bytes_follow_the_storage_type_and_all_axes():
    case = Case(context=100, kv_heads=2, q_heads=6, head_dim=64, batch=3, kv_dtype="bf16")
    assert case.kv_live_bytes == 2 * 3 * 100 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context", 0),
        ("context", 2**31),
        ("q_len", -1),
        ("q_len", 0),
        ("q_len", 65),
        ("q_heads", 0),
        ("kv_heads", 0),
        ("kv_heads", -2),
        ("head_dim", 513),
        ("page_size", 0),
        ("page_size", 65537),
        ("batch", 0),
        ("kv_dtype", "int8"),
    ],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(UsageError, match=f"--{field}={value}: (accepted|known) are"):
        dataclasses.replace(Case(), **{field: value}).check()


def test_head_counts_must_divide():
    with pytest.raises(UsageError, match="--q_heads=6 is not a multiple of --kv_heads=4"):
        Case(kv_heads=4).check()


def test_memory_is_computed_and_refused_in_words():
    case = Case(batch=4096)
    with pytest.raises(UsageError) as refusal:
        case.check_memory(24 * 2**30)
    message = str(refusal.value)
    assert "needs 517.4 GiB of memory (KV cache 515.0 GiB, queries and outputs 1.5 GiB" in message
    assert "24.0 GiB to give" in message
    Case().check_memory(24 * 2**30)


def test_a_peers_copies_count():
    case = Case()
    without = sum(case.memory_parts_bytes().values())
    with_peer = sum(case.memory_parts_bytes(peers=("torch",)).values())
    assert with_peer - without >= 2 * 4 * case.context * case.head_dim


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (2**20, "1.0 MiB"), (1023 * 2**30, "1023.0 GiB")],
)
def test_sizes_in_words(size, text):
    assert format_bytes(size) == text


def test_absurd_sizes_in_words():
    assert format_bytes(2**70) == "1,048,576 PiB"


def fake_machine(tmp_path, available_kib, limits):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n"
    )
    for name, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 4096 * 1024),
        ({"memory.max": "max\n"}, 4096 * 1024),
        ({"memory.max": "1048576\n"}, 1048576),
        ({"memory/memory.limit_in_bytes": "2048\n"}, 2048),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 4096 * 1024),
    ],
)
def test_available_memory_heeds_the_containers_limit(tmp_path, limits, expected):
    assert available_memory_bytes(fake_machine(tmp_path, 4096, limits)) == expected


def test_available_memory_of_this_machine():
    assert 2**28 < available_memory_bytes() < 2**50
