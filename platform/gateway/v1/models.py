"""GET /v1/models and /v1/models/{id}: what this key may use, with context length and service tiers."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.errors import Reason, Refusal
from gateway.text import Text
from gateway.v1.routes import Call
from gateway.v1.schemas import MAX_MODEL_NAME

CREATED = 1_730_419_200  # SmolLM2's release; the shape wants a moment and a model file has none


async def list_models(call: Call) -> None:
    data = [_model(text, tiers) for text, tiers in call.runtime.door.models_of(call.caller)]
    await call.exchange.answer(200, msgspec.json.encode({"object": "list", "data": data}))


async def get_model(call: Call) -> None:
    """A model that no class of the tenant has is answered exactly like one that is not there."""
    (model,) = call.arguments
    for text, tiers in call.runtime.door.models_of(call.caller):
        if text.model == model:
            await call.exchange.answer(200, msgspec.json.encode(_model(text, tiers)))
            return
    message = f"The model {model[:MAX_MODEL_NAME]!r} does not exist or you do not have access to it."
    await call.exchange.refuse(Refusal(reason=Reason.MODEL_NOT_FOUND, message=message, param="model"))


def _model(text: Text, tiers: list[str]) -> dict[str, Any]:
    return {
        "id": text.model,
        "object": "model",
        "created": CREATED,
        "owned_by": "rubato",
        "context_length": text.context_length,
        "service_tiers": tiers,
    }
