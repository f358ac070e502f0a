"""One call that gives a model flashverify's attention and paged cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs
from transformers.utils import ModelOutput

from flashverify import proof
from flashverify._arguments import check_bool, refuse
from flashverify.dtypes import KVScales, resolve_kv_cache_dtype
from flashverify.errors import InvalidArgumentError, UnsupportedError
from flashverify.integrations.row_invariant_linear import RowInvariantLinears
from flashverify.integrations.transformers import attention, versions
from flashverify.integrations.transformers.paged_layer import PagedLayer, check_page_size
from flashverify.routing import Route

_PAGED = ("full_attention", "sliding_attention")
# Layers without keys: transformers' own states serve them.
_KEYLESS = ("linear_attention", "conv", "mamba", "moe", "mlp")


class Integration:
    """A model that runs flashverify's attention, until `disable` or the end of a ``with``."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_cache_dtype: str,
        page_size: int,
        kv_scales: Sequence[KVScales | None] | None,
        route: Route | str | None,
        row_invariant_linears: bool,
    ) -> None:
        """Changes the model; see `enable`."""
        versions.check()
        self.model = model
        self._kv_cache_dtype = kv_cache_dtype
        self._page_size = page_size
        self._route = None if route is None else proof.parse_route(route)
        self._text_config = _text_config(model)
        self._layers = _layer_types(self._text_config)
        check_page_size(page_size)
        check_bool("row_invariant_linears", row_invariant_linears)
        resolve_kv_cache_dtype(kv_cache_dtype, model_dtype=model.dtype, device=model.device)
        self._kv_scales = _scales_by_layer(kv_scales, len(self._layers))
        if "generate" in vars(model):
            raise InvalidArgumentError(
                "model: its generate was replaced already; accepted: a model that enable() was "
                "not called with, or that was disabled since"
            )
        self._linears = RowInvariantLinears(model) if row_invariant_linears else None
        self._implementation_before = self._text_config._attn_implementation
        attention.register()
        try:
            self._set_attention(attention.ATTENTION_NAME)
            if self._text_config._attn_implementation != attention.ATTENTION_NAME:
                raise UnsupportedError(
                    f"model: {type(model).__name__} does not let its attention be set; accepted: "
                    "a model whose attention goes through transformers' AttentionInterface"
                )
        except BaseException:
            if self._linears is not None:
                self._linears.restore()
            raise
        self._forward_signature = inspect.signature(model.forward)
        self._hooks = (
            model.register_forward_pre_hook(self._give_cache, with_kwargs=True),
            model.register_forward_hook(_take_unwanted_cache),
        )
        model.generate = self._wrap_generate(model.generate)

    def new_cache(self) -> Cache:
        """An empty cache for the model: a `PagedLayer` for each layer that has keys."""
        return Cache(
            layers=[
                PagedLayer(
                    kv_cache_dtype=self._kv_cache_dtype,
                    page_size=self._page_size,
                    scales=scales,
                    route=self._route,
                )
                if kind in _PAGED
                else DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments)
                for (kind, arguments), scales in zip(self._layers, self._kv_scales, strict=True)
            ]
        )

    def disable(self) -> None:
        """Gives the model back what it had; a second call does nothing."""
        if self.model.__dict__.pop("generate", None) is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._set_attention(self._implementation_before)
        if self._linears is not None:
            self._linears.restore()

    def __enter__(self) -> Integration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disable()

    def _set_attention(self, name: str) -> None:
        config = self.model.config
        if self._text_config is config:
            self.model.set_attn_implementation(name)
            return
        # A vision tower beside the language model keeps its own attention.
        key = next(key for key in config.sub_configs if getattr(config, key) is self._text_config)
        self.model.set_attn_implementation({key: name})

    def _wrap_generate(self, generate: Any) -> Any:
        @functools.wraps(generate)
        def with_paged_cache(*args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("generation_config") or self.model.generation_config
            use_cache = kwargs.get("use_cache", config.use_cache)
            # Without one, each step is a pass over the whole text, with a cache of its own.
            if kwargs.get("past_key_values") is None and use_cache is not False:
                kwargs["past_key_values"] = self.new_cache()
            return generate(*args, **kwargs)

        return with_paged_cache

    def _give_cache(
        self, _model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pass without a cache gets one, so that its keys are quantised alike."""
        bound = self._forward_signature.bind(*args, **kwargs)
        if bound.arguments.get("past_key_values") is None:
            cache = self.new_cache()
            use_cache = bound.arguments.get("use_cache")
            use_cache = self._text_config.use_cache if use_cache is None else use_cache
            cache.is_unwanted = not use_cache
            bound.arguments["past_key_values"] = cache
        return bound.args, bound.kwargs


def enable(
    model: PreTrainedModel,
    *,
    kv_cache_dtype: str = "fp8",
    page_size: int = 64,
    kv_scales: Sequence[KVScales | None] | None = None,
    route: Route | str | None = None,
    row_invariant_linears: bool = False,
) -> Integration:
    """Gives a decoder model flashverify's attention and a paged cache.

    `generate`, with prompt lookup and with an assistant too, and plain forward passes
    then keep their keys and values in pages and attend them with FP32 state. Caches of
    other classes are refused. Nothing is trained: gradients do not flow.

    Args:
      model: A decoder whose attention goes through transformers' `AttentionInterface`.
      kv_cache_dtype: Storage of keys and values: "fp8" (E4M3), "fp8_e5m2", "float16",
        "bfloat16", or "auto" for the model's own.
      page_size: Tokens of a page, 1 to 65536.
      kv_scales: Dequantisation scales of each layer, such as `kv_scales_from_checkpoint`
        reads; None, for a layer or for all, is 1.0.
      route: The route of every call; None lets `plan_route` choose, which keeps FP32 state.
      row_invariant_linears: Whether linear layers compute two rows where they are given
        one, so that decoding and verifying a token are the same bits on a CPU; bfloat16
        models only.

    Returns:
      The handle that undoes the change, and makes caches.

    Raises:
      InvalidArgumentError: An argument that cannot be used; the model is as it was.
      UnsupportedError: A transformers release, a model or a layer that this does not serve.
    """
    return Integration(
        model,
        kv_cache_dtype=kv_cache_dtype,
        page_size=page_size,
        kv_scales=kv_scales,
        route=route,
        row_invariant_linears=row_invariant_linears,
    )


def _take_unwanted_cache(_model: torch.nn.Module, _args: object, output: Any) -> Any:
    """Leaves the cache of a pass that was asked for none out of its output."""

    def wanted(value: object) -> bool:
        return not getattr(value, "is_unwanted", False)

    if isinstance(output, ModelOutput):
        if all(map(wanted, output.values())):
            return output
        return type(output)(**{name: value for name, value in output.items() if wanted(value)})
    return tuple(filter(wanted, output)) if isinstance(output, tuple) else output


def _text_config(model: PreTrainedModel) -> Any:
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgumentError(
            f"model: {type(model).__name__}; accepted: a transformers PreTrainedModel"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"model: {type(model).__name__} has an encoder; accepted: decoders alone"
        )
    return model.config.get_text_config(decoder=True)


def _scales_by_layer(given: object, layers: int) -> Sequence[KVScales | None]:
    if given is None:
        return [None] * layers
    accepted = f"None, or a sequence of {layers} elements, one for each layer: KVScales or None"
    if isinstance(given, str) or not isinstance(given, Sequence):
        refuse("kv_scales", f"{given!r:.80}", accepted)
    if len(given) != layers:
        refuse("kv_scales", f"{len(given)} elements", accepted)
    for index, scales in enumerate(given):
        if scales is not None and not isinstance(scales, KVScales):
            refuse(f"kv_scales[{index}]", f"{scales!r:.80}", "KVScales or None")
    return given


def _layer_types(config: Any) -> list[tuple[str, dict[str, Any]]]:
    kinds, arguments = get_layer_types_and_kwargs(config)
    for index, kind in enumerate(kinds):
        if kind not in (*_PAGED, *_KEYLESS):
            raise UnsupportedError(
                f"model: layer {index} is of type {kind}; accepted: "
                f"{', '.join((*_PAGED, *_KEYLESS))}"
            )
    return list(zip(kinds, arguments, strict=True))
