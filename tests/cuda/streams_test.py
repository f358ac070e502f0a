"""Streams, threads and images: who calls, and with which code, is the call's own business."""

import threading

import pytest
import torch

import flashverify as fv
from flashverify import info
from tests.support import backends, cases

ROUTES = pytest.mark.parametrize("route", backends.FP32_ROUTES)


def inputs_of(seed: int, seq_len: int = 3000) -> cases.Case:
    request = cases.random_request(seed, q_len=8, seq_len=seq_len, q_heads=6, head_dim=128)
    return cases.paged([request], page_size=48)


@ROUTES
@backends.on_cuda
def test_two_streams_at_once(route: str, backend: backends.Backend) -> None:
    """Each with the default workspace of its own: they overlap, and nothing mixes."""
    wanted = [backends.attend(inputs_of(seed), backend, route=route) for seed in (1, 2)]
    inputs = [backends.arguments(inputs_of(seed), "cuda") for seed in (1, 2)]
    streams = [torch.cuda.Stream() for _ in inputs]
    outs = [[torch.empty_like(i["q"]) for _ in range(50)] for i in inputs]
    torch.cuda.synchronize()
    with backend.selected():
        for repeat in range(50):
            for stream, arguments, out in zip(streams, inputs, outs, strict=True):
                with torch.cuda.stream(stream):
                    fv.paged_attention(**arguments, route=route, out=out[repeat])
    torch.cuda.synchronize()
    for mine, expected in zip(outs, wanted, strict=True):
        for out in mine:
            assert torch.equal(cases.bits(out.cpu()), cases.bits(expected.out))


@ROUTES
@backends.on_cuda
def test_threads_at_once(route: str, backend: backends.Backend) -> None:
    wanted = [backends.attend(inputs_of(seed), backend, route=route) for seed in range(4)]
    failures: list[str] = []

    def work(seed: int) -> None:
        arguments = backends.arguments(inputs_of(seed), "cuda")
        with torch.cuda.stream(torch.cuda.Stream()), backend.selected():
            for _ in range(20):
                out = fv.paged_attention(**arguments, route=route)
                if not torch.equal(cases.bits(out.cpu()), cases.bits(wanted[seed].out)):
                    failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@ROUTES
@backends.on_cuda
def test_the_image_that_ran_is_told(route: str, backend: backends.Backend) -> None:
    backends.attend(inputs_of(1, 200), backend, route=route)
    found = fv.last_cuda_image()
    assert found in fv.native_info()["cuda_images"]
    if backend.image is not None:
        assert found == backend.image
    backends.attend(inputs_of(1, 200), backends.CPU, route=route)
    assert fv.last_cuda_image() is None


def test_an_image_that_the_library_has_not_is_refused() -> None:
    with (
        pytest.raises(fv.InvalidArgumentError, match="image: 'sm_1'; accepted: "),
        fv.cuda_image_override("sm_1"),
    ):
        pass


def test_a_machine_without_a_driver_says_so() -> None:
    found = info.cuda_devices()
    if not torch.cuda.is_available():
        assert isinstance(found, str) and found
    else:
        assert len(found) == torch.cuda.device_count()
