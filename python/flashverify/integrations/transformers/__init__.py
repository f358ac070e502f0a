"""transformers with flashverify's attention and a paged FP8 cache: call `enable`."""

from flashverify.integrations.transformers.attention import ATTENTION_NAME
from flashverify.integrations.transformers.enable import Integration, enable
from flashverify.integrations.transformers.paged_layer import PagedLayer

__all__ = ["ATTENTION_NAME", "Integration", "PagedLayer", "enable"]
