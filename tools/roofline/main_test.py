import os
from pathlib import Path

from tools.roofline.main import main
from tools.roofline.model import CASES, choose, predict
from tools.roofline.sass import kernels

IMAGES = sorted(
    (Path(os.environ["TEST_SRCDIR"]) / os.environ["TEST_WORKSPACE"] / "native/cuda").glob(
        "grouped_sm70_e4m3_*.sm_70.cubin"
    )
)


def test_the_table_has_every_case_and_says_what_it_is(capsys):
    assert main([str(path) for path in IMAGES]) == 0
    text = capsys.readouterr().out
    assert text.startswith("PREDICTED for V100")
    for case in CASES:
        assert f"| {case.label} |" in text


def test_verification_at_256k_is_predicted_below_400_us():
    found = {kernel.name: kernel for path in IMAGES for kernel in kernels(path)}
    for route in ("fp32", "half"):
        kernel = found[choose(CASES[0], list(found), route)]
        assert predict(CASES[0], kernel).predicted_us <= 400.0


def test_a_file_that_is_no_cubin_is_an_error(capsys):
    assert main([__file__]) == 1
    assert "not an ELF file" in capsys.readouterr().err
