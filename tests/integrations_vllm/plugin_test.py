import subprocess
import sys

import pytest

import flashverify as fv
from flashverify.integrations.vllm.versions import check_offers, check_version, refuse_layer


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.0.dev3+g12", "0.32"])
def test_a_known_release_passes_with_its_builds_and_forks(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.33.0", "0.31.9", "0.3.2", "0.320.0", "1.32.0", "dev", ""])
def test_another_release_is_answered_in_words(version):
    with pytest.raises(fv.UnsupportedError) as caught:
        check_version(version)
    assert f"vllm: version {version}; accepted: 0.32.*" in str(caught.value)
    assert "VLLM_PLUGINS" in str(caught.value)


def test_a_fork_that_lacks_something_is_told_what():
    check_offers("Metadata", ["a", "b", "c"], ["a", "b"])
    with pytest.raises(fv.UnsupportedError, match="Metadata has no d, e, which flashverify needs"):
        check_offers("Metadata", ["a"], ["e", "a", "d"])


def test_a_refused_layer_says_that_no_other_backend_gets_it():
    with pytest.raises(fv.UnsupportedError) as caught:
        refuse_layer("alibi_slopes", "given", "None")
    assert str(caught.value).startswith("alibi_slopes: given; accepted: None; flashverify never")


def test_the_entry_point_imports_nothing_before_it_is_called():
    """vLLM hides what fails in an import, and shows what fails in the call."""
    code = (
        "import sys; import flashverify_vllm_plugin as plugin; "
        "assert 'flashverify' not in sys.modules and 'vllm' not in sys.modules; "
        "plugin.register()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    # No vLLM here: the call, and not the import, says so.
    assert done.returncode != 0
    assert "ModuleNotFoundError: No module named 'vllm'" in done.stderr
