import pytest

import flashverify as fv
from flashverify.integrations.vllm.options import Options


@pytest.mark.parametrize("given", [None, {}, {"other": {"a": 1}}, {"flashverify": None}])
def test_nothing_given_gives_the_defaults(given):
    assert Options.from_additional_config(given) == Options(
        route=None, row_invariant_linears=False, fp32_logits=None
    )


def test_each_option_is_read():
    given = {"route": "grouped_half", "row_invariant_linears": True, "fp32_logits": False}
    assert Options.from_additional_config({"flashverify": given}) == Options(
        route=fv.Route.grouped_half, row_invariant_linears=True, fp32_logits=False
    )


def test_null_is_the_default():
    given = {"route": None, "row_invariant_linears": None, "fp32_logits": None}
    assert Options.from_additional_config({"flashverify": given}) == Options()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rout": "grouped_fp32"}, r"'rout' is no option; accepted: route, row_invariant_linears"),
        ("grouped_fp32", r"'grouped_fp32'; accepted: an object with route"),
        ({"route": "fast"}, r"\['route'\]: 'fast'; accepted: grouped_fp32"),
        ({"route": 1}, r"\['route'\]: 1; accepted: grouped_fp32"),
        ({"row_invariant_linears": "yes"}, r"\['row_invariant_linears'\]: 'yes'; accepted: true"),
        ({"schedule": "n3"}, r"\['schedule'\]: 'n3'; accepted: n1, n2, n4"),
        ({"fp32_logits": 1}, r"\['fp32_logits'\]: 1; accepted: true, false or null"),
    ],
)
def test_a_wrong_option_is_named(given, message):
    with pytest.raises(fv.InvalidArgumentError, match=message):
        Options.from_additional_config({"flashverify": given})
