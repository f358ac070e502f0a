"""vLLM's entry point to flashverify, a module of its own so that no failure is hidden.

vLLM imports an entry point's module within a guard that logs the error and goes on
without the plugin: were this module below `flashverify`, a stale native library would
leave the engine running on another attention backend. It calls `register` without a
guard, so what fails there stops the engine.
"""


def register() -> None:
    """Makes flashverify vLLM's attention backend.

    Raises:
      flashverify.StaleNativeLibraryError: The native library is not this package's.
      flashverify.UnsupportedError: This vLLM is not one that the integration knows.
    """
    from flashverify.integrations.vllm import plugin

    plugin.register()
