"""Voices that speak: a list, for which no model is loaded."""

from typing import Any

from fastapi import APIRouter

from deployments.config import voice_files
from deployments.config.capability_section import CapabilityConfig
from deployments.front.dependencies import Inferrer, State
from deployments.front.openapi import refusals
from deployments.front.status import model_cards

ROLE = "tts"
router = APIRouter(prefix="/v1/audio")


@router.get("/voices", responses=refusals(401, 403))
async def voices(caller: Inferrer, front: State) -> dict[str, Any]:
    """The values that `voice` of POST /v1/audio/speech may have, for each model that speaks; of a
    model whose file server hangs none."""
    table = front.table
    models = [model for model, home in table.homes.items() if table.capabilities[home].role == ROLE]
    spoken = await model_cards.from_files(table, models, _voices)
    rows = [
        {
            "id": voice,
            "object": "audio.voice",
            "name": voice,
            "created_at": front.started_unix_s,
            "model": model,
        }
        for model, voices in spoken.items()
        for voice in voices or ()
    ]
    return {"object": "list", "data": rows, "voices": sorted({row["id"] for row in rows})}


def _voices(model: str, capability: CapabilityConfig) -> list[str]:
    return voice_files.voices(model, capability.models[model])
