"""The limits on what a call costs from Python, on a tiny problem."""

from tools.call_cost import call_cost


def test_calls_cost_less_than_their_limits() -> None:
    # One undisturbed run of 200 calls is enough: neighbours can only add.
    costs = call_cost.measure(runs=400)
    for name, limit_us in call_cost.LIMITS_US.items():
        assert costs[name] < limit_us, costs
