"""A config.json as a ModelConfig. Knows its fields by their names there; refuses what the forward does not compute
rather than computing it wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpu_worker.models.config import FAMILIES, LinearRope, Llama3Rope, ModelConfig, PlainRope, Rope


class FieldError(ValueError):
    """One sentence that names the field and what it holds."""


def parse_config(settings: Mapping[str, Any]) -> ModelConfig:
    """Raises FieldError. What the numbers mean together is looked at by ``ModelConfig.wrong_field``."""
    kind = settings.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise FieldError(f"field model_type is {kind!r}; known are {', '.join(FAMILIES)}")
    scaling = _scaling(settings)
    _refuse_unknown(settings, scaling)
    heads, hidden = _whole(settings, "num_attention_heads"), _whole(settings, "hidden_size")
    context = _whole(settings, "max_position_embeddings")
    # Qwen's files name a window and say that it is not used; Mistral's use it.
    window = _whole(settings, "sliding_window", 0) if kind == "mistral" else 0
    theta_of = scaling if scaling.get("rope_theta") is not None else settings
    tied = settings.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise FieldError(f"field tie_word_embeddings must be true or false, not {tied!r}")
    return ModelConfig(
        vocab_size=_whole(settings, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_whole(settings, "intermediate_size"),
        num_layers=_whole(settings, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_whole(settings, "num_key_value_heads", 0) or heads,
        head_dim=_whole(settings, "head_dim", 0) or hidden // max(heads, 1),
        rms_norm_epsilon=_real(settings, "rms_norm_eps"),
        rope_theta=_real(theta_of, "rope_theta", 10_000.0),
        context_length=min(context, window) if window else context,  # inside the window it is full attention
        tied_embeddings=tied,
        rope=_rope(scaling),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _given(settings: Mapping[str, Any], field: str, default: float | None) -> Any:
    found = settings.get(field)
    if found is None:
        if default is None:
            raise FieldError(f"field {field} is missing")
        return default
    return found


def _whole(settings: Mapping[str, Any], field: str, default: int | None = None) -> int:
    found = _given(settings, field, default)
    if isinstance(found, bool) or not isinstance(found, int):
        raise FieldError(f"field {field} must be a whole number, not {found!r}")
    return found


def _real(settings: Mapping[str, Any], field: str, default: float | None = None) -> float:
    found = _given(settings, field, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise FieldError(f"field {field} must be a finite number, not {found!r}")
    return float(found)


def _scaling(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    for field in ("rope_parameters", "rope_scaling"):
        if found := settings.get(field):
            if not isinstance(found, dict):
                raise FieldError(f"field {field} must be an object, not {found!r}")
            return found
    return {}


def _refuse_unknown(settings: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    for field in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config", "rope_interleaved"):
        if settings.get(field):
            raise FieldError(f"field {field} is set, which is not supported")
    for field, only in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        found = settings.get(field, scaling.get(field, only))
        if found != only:
            raise FieldError(f"field {field} is {found!r}; only {only} is supported")
    kinds = settings.get("layer_types") or ()
    if not isinstance(kinds, list | tuple):
        raise FieldError(f"field layer_types must be a list, not {kinds!r}")
    others = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if others and settings.get("model_type") != "mistral":
        raise FieldError(f"field layer_types names {others[0]!r}; only full_attention is supported")


def _rope(scaling: Mapping[str, Any]) -> Rope:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    match kind:
        case "default":
            return PlainRope()
        case "linear":
            return LinearRope(_real(scaling, "factor"))
        case "llama3":
            return Llama3Rope(
                factor=_real(scaling, "factor"),
                low_frequency_factor=_real(scaling, "low_freq_factor"),
                high_frequency_factor=_real(scaling, "high_freq_factor"),
                original_context=_whole(scaling, "original_max_position_embeddings"),
            )
    raise FieldError(f"field rope_scaling.rope_type is {kind!r}; known are default, linear, llama3")
