"""The defaults of the DFlash2 configuration, as one value that says why.

DFlash2 drafts a block of tokens in one non-causal pass and verifies it with one
causal pass of the target. `DFlash2Config` holds what that needs of the attention
and of the LM head. It is read from a model's config.json or an engine's
speculative configuration, any field can be set by the caller, each field has its
reason in words, and parts that contradict each other are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flashverify.dtypes import KV_CACHE_DTYPES, KVCacheDtype, resolve_kv_cache_dtype
from flashverify.errors import InvalidArgumentError, UnsupportedError
from flashverify.precision import PRECISION_REVISION
from flashverify.routing import RouteRequest, SpeculativeMethod

METHODS: Final = ("dflash", "dflash2")
DRAFT_ARCHITECTURE: Final = "DFlash2DraftModel"
MAX_SPECULATIVE_TOKENS: Final = 31  # 32 query rows a request: the grouped kernel on every device

_BY_CALLER: Final = "set by the caller"

# Heads for multi-token prediction, as config files count their layers.
_MTP_LAYERS: Final = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


# Why each default is what it is.
_WHY: Final[dict[str, str]] = {
    "kv_cache_dtype": "half the bytes of a 16-bit cache, and a mantissa bit more than E5M2",
    "fp32_logits": "16-bit logits tie or swap the two best tokens, and a draft is then misjudged",
    "num_speculative_tokens": "the drafter's block of 8: one anchor, 7 drafts",
    "target_causal": "a verified row must not see the drafts after it",
    "draft_causal": "the drafter fills its block in one bidirectional pass",
    "draft_window_tokens": "the drafter's layers attend to a window",
    "draft_kv_cache_dtype": "the drafter's window is short, and its cache is not quantised",
    "mtp": "one drafter at a time: DFlash2 drafts here",
    "precision_revision": "FP32 state, from the partials to the merge, is this revision's",
}


@dataclass(frozen=True)
class DFlash2Config:
    """What attention and LM head do under DFlash2.

    Attributes:
      kv_cache_dtype: The target's cache.
      fp32_logits: Whether the LM head gives FP32 logits (`lm_head_logits`).
      num_speculative_tokens: Drafted tokens of one block.
      target_causal: Causality of the target's verification pass.
      draft_causal: Causality of the drafter's attention.
      draft_window_tokens: Keys that a row of the drafter sees, the block
        included; None is all.
      draft_kv_cache_dtype: The drafter's cache.
      mtp: Whether the target's own multi-token prediction drafts too.
      precision_revision: The arithmetic that the native library must have.
      sources: (field, reason) for what did not come from the defaults.

    Raises:
      InvalidArgumentError: A value of the wrong type.
      UnsupportedError: A value out of range, or one that contradicts another.
    """

    kv_cache_dtype: KVCacheDtype = "fp8_e4m3"
    fp32_logits: bool = True
    num_speculative_tokens: int = 7
    target_causal: bool = True
    draft_causal: bool = False
    draft_window_tokens: int | None = 2048
    draft_kv_cache_dtype: KVCacheDtype = "float16"
    mtp: bool = False
    precision_revision: int = PRECISION_REVISION
    sources: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in _FIELD_TYPES.items():
            if type(getattr(self, name)) is not kind:
                raise InvalidArgumentError(
                    f"{name}: {getattr(self, name)!r}; accepted: {kind.__name__}"
                )
        for name in ("kv_cache_dtype", "draft_kv_cache_dtype"):
            if getattr(self, name) not in KV_CACHE_DTYPES:
                raise UnsupportedError(
                    f"{name}: {getattr(self, name)!r}; accepted, once resolved: "
                    f"{', '.join(KV_CACHE_DTYPES)}"
                )
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise UnsupportedError(
                f"num_speculative_tokens: {self.num_speculative_tokens}; accepted: "
                f"1..{MAX_SPECULATIVE_TOKENS}"
            )
        for name, only in (
            ("target_causal", True),
            ("draft_causal", False),
            ("mtp", False),
            ("precision_revision", PRECISION_REVISION),
        ):
            if getattr(self, name) != only:
                raise UnsupportedError(
                    f"{name}: {getattr(self, name)}; accepted: {only} ({_WHY[name]})"
                )
        window = self.draft_window_tokens
        if window is None:
            return
        if type(window) is not int:
            raise InvalidArgumentError(f"draft_window_tokens: {window!r}; accepted: int, or None")
        if window < self.q_len:
            raise UnsupportedError(
                f"draft_window_tokens: {window}; accepted: {self.q_len} and more (the block "
                "itself), or None"
            )

    @property
    def q_len(self) -> int:
        """Query rows of one request in a verification pass: the drafts and one token more."""
        return self.num_speculative_tokens + 1

    @property
    def reasons(self) -> dict[str, str]:
        """Why each field has its value."""
        known = dict(self.sources)
        return {
            name: known.get(name)
            or (
                f"default: {why}" if getattr(self, name) == _DEFAULTS[name] else "set by the caller"
            )
            for name, why in _WHY.items()
        }

    def __str__(self) -> str:
        width = max(map(len, _WHY))
        return "\n".join(
            f"{name:<{width}}  {getattr(self, name)!s:<8}  {reason}"
            for name, reason in self.reasons.items()
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **overrides: Any) -> DFlash2Config:
        """Reads a configuration, and lets the caller's values win, field by field.

        Args:
          config: The parsed config.json of a target that names DFlash2 (itself,
            or under ``speculative_config``), the config.json of a DFlash2
            drafter, or an engine's speculative configuration.
          **overrides: Fields of this class. Cache dtypes may be written as
            `resolve_kv_cache_dtype` takes them.

        Raises:
          InvalidArgumentError: An override that is no field, or a value of the
            wrong type.
          UnsupportedError: The configuration is not DFlash2's, or it contradicts
            itself, the overrides or the contract.
        """
        found = _read(config)
        for name, value in overrides.items():
            if name not in _WHY:
                raise InvalidArgumentError(
                    f"{name}: no field of DFlash2Config; accepted: {', '.join(_WHY)}"
                )
            if name.endswith("kv_cache_dtype"):
                value = resolve_kv_cache_dtype(value, model_dtype=_model_dtype(config))
            found[name] = (value, _BY_CALLER)
        return cls(
            **{name: value for name, (value, _) in found.items()},
            sources=tuple((name, reason) for name, (_, reason) in found.items()),
        )

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> DFlash2Config:
        """As `from_config`, from a config.json or the folder that holds one.

        Raises:
          InvalidArgumentError: The file cannot be read, or is no JSON object.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(
                f"path: {file}; accepted: a readable config.json ({error})"
            ) from error
        if not isinstance(config, dict):
            raise InvalidArgumentError(f"path: {file}; accepted: a JSON object")
        return cls.from_config(config, **overrides)

    def target_request(
        self,
        *,
        device_type: str,
        head_dim: int,
        group: int,
        page_size: int,
        q_dtype: str = "float16",
        capability: tuple[int, int] | None = None,
        q_len: int | None = None,
    ) -> RouteRequest:
        """The route request of a verification pass; ``q_len`` None is a whole block."""
        return RouteRequest(
            device_type=device_type,
            capability=capability,
            kv_cache_dtype=self.kv_cache_dtype,
            q_dtype=q_dtype,
            q_len=self.q_len if q_len is None else q_len,
            head_dim=head_dim,
            group=group,
            page_size=page_size,
            causal=self.target_causal,
            speculative_method=SpeculativeMethod.dflash2_target,
        )

    def draft_request(
        self,
        *,
        device_type: str,
        head_dim: int,
        group: int,
        page_size: int,
        q_dtype: str = "float16",
        capability: tuple[int, int] | None = None,
    ) -> RouteRequest:
        """The route request of the drafter's attention over one block."""
        return RouteRequest(
            device_type=device_type,
            capability=capability,
            kv_cache_dtype=self.draft_kv_cache_dtype,
            q_dtype=q_dtype,
            q_len=self.q_len,
            head_dim=head_dim,
            group=group,
            page_size=page_size,
            causal=self.draft_causal,
            speculative_method=SpeculativeMethod.dflash2_draft,
        )


_FIELD_TYPES: Final[dict[str, type]] = {
    "kv_cache_dtype": str,
    "fp32_logits": bool,
    "num_speculative_tokens": int,
    "target_causal": bool,
    "draft_causal": bool,
    "draft_kv_cache_dtype": str,
    "mtp": bool,
    "precision_revision": int,
}
_DEFAULTS: Final = {f.name: f.default for f in dataclasses.fields(DFlash2Config)}

_Found = dict[str, tuple[Any, str]]


def _read(config: Mapping[str, Any]) -> _Found:
    """The fields that a configuration sets, each with where it was found."""
    speculative = _section(config, "speculative_config") or config
    method = speculative.get("method")
    draft = _section(config, "dflash_config")
    architectures = _names(config, "architectures") or []
    is_draft = draft is not None or DRAFT_ARCHITECTURE in architectures
    if isinstance(method, str) and method.lower().endswith("mtp"):
        raise UnsupportedError(
            f"method: {method!r}; accepted: {', '.join(METHODS)} ({_WHY['mtp']})"
        )
    if method not in METHODS and not (method is None and is_draft):
        raise UnsupportedError(
            f"method: {method!r}; accepted: {', '.join(METHODS)}, or the config.json of a "
            f"{DRAFT_ARCHITECTURE}"
        )
    found: _Found = {}
    tokens = speculative.get("num_speculative_tokens")
    if tokens is not None:
        found["num_speculative_tokens"] = (tokens, "num_speculative_tokens of the configuration")
    if is_draft:
        _read_draft(config, draft or {}, found)
    _read_mtp(config, found)
    return found


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    section = config.get(name)
    if section is not None and not isinstance(section, Mapping):
        raise InvalidArgumentError(f"{name}: {section!r}; accepted: an object")
    return section


def _names(config: Mapping[str, Any], name: str) -> list[Any] | None:
    names = config.get(name)
    if names is not None and not isinstance(names, list):
        raise InvalidArgumentError(f"{name}: {names!r}; accepted: a list")
    return names


def _model_dtype(config: Mapping[str, Any]) -> str | None:
    for section in (config, _section(config, "text_config") or {}):
        for name in ("dtype", "torch_dtype"):
            if isinstance(section.get(name), str):
                return str(section[name])
    return None


def _read_draft(config: Mapping[str, Any], draft: Mapping[str, Any], found: _Found) -> None:
    block = draft.get("block_size", config.get("block_size"))
    if block is not None:
        if type(block) is not int:
            raise InvalidArgumentError(f"block_size: {block!r}; accepted: int")
        tokens, _ = found.get("num_speculative_tokens", (block - 1, ""))
        if tokens != block - 1:
            raise UnsupportedError(
                f"num_speculative_tokens: {tokens!r}; accepted: {block - 1}, one less than the "
                f"drafter's block_size of {block}"
            )
        found["num_speculative_tokens"] = (tokens, f"the drafter's block_size of {block}, less one")
    for section, name in ((config, "is_causal"), (draft, "causal")):
        if section.get(name) is not None:
            found["draft_causal"] = (section[name], f"the drafter's {name}")
    layers = _names(config, "layer_types")
    if layers is not None and "sliding_attention" not in layers:
        found["draft_window_tokens"] = (None, "the drafter's layer_types name no sliding layer")
    elif config.get("use_sliding_window") is False:
        found["draft_window_tokens"] = (None, "the drafter's use_sliding_window is false")
    elif config.get("sliding_window") is not None:
        found["draft_window_tokens"] = (config["sliding_window"], "the drafter's sliding_window")
    dtype = _model_dtype(config)
    if dtype in ("float16", "bfloat16"):
        found["draft_kv_cache_dtype"] = (dtype, "the drafter's dtype")


def _read_mtp(config: Mapping[str, Any], found: _Found) -> None:
    for section in (config, _section(config, "text_config") or {}):
        for name in _MTP_LAYERS:
            if section.get(name):
                found["mtp"] = (False, f"the model has an MTP head ({name}), which is not enabled")
