"""Random problems over the whole product of arguments, from fixed seeds.

A failure prints its seed and its arguments; the same seed is the same problem for
ever, on every machine.
"""

import functools
import random

import pytest
import torch

from tests.support import backends, cases, tolerances

SEEDS = range(240)


@functools.lru_cache(maxsize=1)
def _problem(seed: int) -> tuple[tolerances.Expected, torch.dtype, str]:
    rng = random.Random(seed)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    kv_heads = rng.choice((1, 1, 2, 3))
    q_heads = kv_heads * rng.choice((1, 2, 3, 6, 8))
    if rng.random() < 0.7:
        head_dim = rng.choice(backends.GROUPED_HEAD_DIMS)
    else:
        head_dim = rng.randrange(1, 300)
    shape = {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "kv_dtype": rng.choice(tuple(cases.CACHE_DTYPES)),
        "q_dtype": rng.choice(dtypes),
    }
    requests = [
        cases.random_request(
            1000 * seed + index,
            q_len=rng.choice((0, 1, 1, 2, 5, 8, rng.randrange(1, 20))),
            seq_len=rng.choice((0, 1, 63, 64, 65, rng.randrange(300), rng.randrange(300))),
            **shape,
        )
        for index in range(rng.randrange(1, 5))
    ]
    options = {
        "causal": rng.random() < 0.7,
        "window": rng.choice((None, None, 1, rng.randrange(1, 100), 10_000)),
        "softcap": rng.choice((0.0, 0.0, 5.0)),
        "scale": rng.choice((None, None, 0.3)),
    }
    if rng.random() < 0.3:
        options["sinks"] = torch.tensor([rng.gauss(0, 3) for _ in range(q_heads)])
    for name in ("k_dequant_scale", "v_dequant_scale"):
        per_head = torch.tensor([rng.uniform(0.1, 2) for _ in range(kv_heads)])
        options[name] = rng.choice((None, None, 0.5, per_head[:1], per_head))
    page_size = rng.choice((1, 4, 16, 17, 64, 128, 1728, rng.randrange(1, 400)))
    layout = rng.choice(tuple(cases.LAYOUTS))
    case = cases.paged(requests, page_size=page_size, layout=layout, seed=seed, **options)
    lengths = [(request.q_len, request.seq_len) for request in requests]
    what = f"{shape} {lengths} {options} page_size {page_size} {layout}"
    return tolerances.expected(case), rng.choice(dtypes), what


@pytest.mark.parametrize("seed", SEEDS)
@backends.on_every_backend
def test_random_problem(seed: int, backend: backends.Backend) -> None:
    expected, out_dtype, what = _problem(seed)
    for route in backends.routes_for(expected.case, backend):
        result = backends.attend(expected.case, backend, route=route, out_dtype=out_dtype)
        expected.check(
            result.out,
            result.lse,
            half_partials=route in backends.HALF_ROUTES,
            half_weights=backends.half_weights(backend, expected.case.k_cache),
            what=f"{route} on {backend}, {out_dtype}: {what}",
        )
