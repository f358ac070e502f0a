"""Counters of recorded texts of vLLM 0.32, and of what can become of them."""

import random
import re
from pathlib import Path

import pytest

from tools.acceptance import counters

DATA = Path(__file__).parent / "data"
BEFORE, AFTER = ((DATA / f"vllm_0_32_{name}.txt").read_text() for name in ("before", "after"))
ENGINE_1 = 'engine="1"'


def difference(before, after):
    return counters.difference(counters.parse(before), counters.parse(after))


def series(text, name):
    """Lines of one family of a text."""
    return [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]


def without(text, *names):
    """The text without the families whose names begin so, comments included."""
    families = "|".join(names)
    return re.sub(rf"^(# \w+ )?vllm:({families}).*\n", "", text, flags=re.MULTILINE)


def test_recorded_request():
    delta = difference(BEFORE, AFTER)
    assert delta == counters.Delta(
        drafts=5,
        draft_tokens=35,
        accepted=35,
        accepted_by_position=(5,) * 7,
        generated=40,
        finished=1,
    )
    assert counters.parse(AFTER).in_flight == 0


def test_nothing_happened():
    assert difference(AFTER, AFTER) == counters.Delta(0, 0, 0, (0,) * 7, 0, 0)


def test_order_of_lines_and_of_labels_does_not_matter():
    lines = [line for line in AFTER.splitlines() if not line.startswith("#")]
    random.Random(0).shuffle(lines)
    turned = "\n".join(lines).replace(
        'engine="0",model_name="smollm2",position="3"',
        'position="3",model_name="smollm2",engine="0"',
    )
    assert turned != AFTER
    assert difference(BEFORE, turned + "\n") == difference(BEFORE, AFTER)


def test_engines_are_summed():
    def two(text):
        own = [line for line in text.splitlines() if line.startswith("vllm:")]
        return text + "\n".join(line.replace('engine="0"', ENGINE_1) for line in own) + "\n"

    delta = difference(two(BEFORE), two(AFTER))
    assert (delta.drafts, delta.accepted, delta.generated, delta.finished) == (10, 70, 80, 2)
    assert delta.accepted_by_position == (10,) * 7
    # One of two engines worked.
    half = BEFORE + "\n".join(
        line.replace('engine="0"', ENGINE_1)
        for line in AFTER.splitlines()
        if line.startswith("vllm:")
    )
    assert difference(two(BEFORE), half + "\n") == difference(BEFORE, AFTER)


def test_running_requests_of_all_engines_are_in_flight():
    busy = AFTER.replace(
        'num_requests_running{engine="0",model_name="smollm2"} 0.0',
        'num_requests_running{engine="0",model_name="smollm2"} 2.0',
    )
    busy += 'vllm:num_requests_waiting{engine="1",model_name="smollm2"} 1.0\n'
    assert counters.parse(busy).in_flight == 3
    bare = without(AFTER, "num_requests_running", "num_requests_waiting")
    assert counters.parse(bare).in_flight is None


def test_created_is_no_counter():
    """A date that changes is no restart, and is added to nothing."""
    later = re.sub(r"(_created\{.*\}) \S+", r"\1 2e9", AFTER)
    assert later.count(" 2e9") > 10
    assert difference(AFTER, later) == difference(AFTER, AFTER)
    assert difference(BEFORE, later) == difference(BEFORE, AFTER)


@pytest.mark.parametrize(
    "family",
    [
        "spec_decode_num_drafts_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "generation_tokens_total",
        "request_success_total",
    ],
)
def test_a_decrease_is_a_restart(family):
    line = next(line for line in series(AFTER, family) if not line.endswith(" 0.0"))
    lower = AFTER.replace(line, line.rsplit(" ", 1)[0] + " 0.0")
    with pytest.raises(counters.RestartError, match=rf"{family}.* fell from \d+ to 0"):
        difference(AFTER, lower)


def test_a_decrease_in_one_engine_is_a_restart_though_the_sum_grows():
    def text(first, second):
        name = "vllm:generation_tokens_total"
        return f'{name}{{engine="0"}} {first}\n{name}{{engine="1"}} {second}\n'

    assert difference(text(40, 40), text(41, 9000)).generated == 8961
    with pytest.raises(counters.RestartError, match="fell from 40 to 7"):
        difference(text(40, 40), text(7, 9000))


def test_a_series_that_vanishes_is_a_restart():
    with pytest.raises(counters.RestartError, match=r"spec_decode_num_drafts_total.* vanished"):
        difference(AFTER, without(AFTER, "spec_decode_num_drafts_total"))
    renamed = AFTER.replace('model_name="smollm2"', 'model_name="other"')
    with pytest.raises(counters.RestartError, match="vanished"):
        difference(AFTER, renamed)


def test_a_process_started_anew_is_a_restart_whatever_it_counts():
    line = next(x for x in AFTER.splitlines() if x.startswith("process_start_time_seconds "))
    with pytest.raises(counters.RestartError, match="process_start_time_seconds changed"):
        difference(BEFORE, AFTER.replace(line, "process_start_time_seconds 1.9e+09"))


def test_missing_families_are_none_and_not_zero():
    bare = [without(text, "spec_decode", "request_success") for text in (BEFORE, AFTER)]
    assert difference(*bare) == counters.Delta(None, None, None, None, 40, None)
    assert counters.parse(bare[1]).missing(*counters.SPECULATION) == list(counters.SPECULATION)


def test_a_series_may_appear_late():
    """Some engines make a series when it first counts."""
    assert difference(without(BEFORE, "spec_decode"), AFTER) == difference(BEFORE, AFTER)


def test_positions_are_numbers_not_words():
    """Position 10 comes after 9, and places that never counted are 0."""
    labels = 'engine="0",model_name="m"'
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    text = "".join(f'{name}{{{labels},position="{p}"}} {20 - p}\n' for p in (10, 9, 2, 0))
    found = difference("", text).accepted_by_position
    assert found == (20, 0, 18, 0, 0, 0, 0, 0, 0, 11, 10)
    with pytest.raises(counters.MetricsError, match="no label position with a place"):
        difference("", f'{name}{{{labels},position="last"}} 1\n')


def test_another_prefix():
    text = AFTER.replace("vllm:", "fork:")
    assert counters.parse(text).series.keys() == {"process_start_time_seconds"}
    found = counters.parse(text, "fork:")
    assert found.total(counters.DRAFTS) == 5


@pytest.mark.parametrize(
    "text",
    [
        "<html><body>not found</body></html>",
        'vllm:generation_tokens_total{engine="0"',
        'vllm:generation_tokens_total{engine="0"} many',
        'vllm:generation_tokens_total{engine="0"} NaN',
        'vllm:generation_tokens_total{engine="0"} -1',
        'vllm:generation_tokens_total{a="0",b="1"} 1\nvllm:generation_tokens_total{b="1",a="0"} 2',
    ],
)
def test_what_is_no_text_of_counters_is_refused(text):
    with pytest.raises(counters.MetricsError):
        counters.parse(text + "\n")


def test_label_values_may_hold_anything():
    text = 'vllm:generation_tokens_total{model_name="a\\"b,c=\\\\d\\n}e"} 3\n'
    assert counters.parse(text).total(counters.GENERATED) == 3
