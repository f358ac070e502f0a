"""flashverify as an attention backend of vLLM.

vLLM finds `flashverify_vllm_plugin.register` by the wheel's entry point, which brings
in `plugin.py`. Modules of this package import vLLM only where they say so; the others
hold what can be decided, and tested, without it.
"""
