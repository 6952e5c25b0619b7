"""Voices that speak: a list, for which no model is loaded."""

from typing import Any

from fastapi import APIRouter

from deployments.config import voice_files
from deployments.config.file_threads import in_thread
from deployments.front.dependencies import FrontState, Inferrer, State
from deployments.front.schemas import refusals

ROLE = "tts"
router = APIRouter(prefix="/v1/audio")


@router.get("/voices", responses=refusals(401, 403))
async def voices(caller: Inferrer, front: State) -> dict[str, Any]:
    """The values that `voice` of POST /v1/audio/speech may have, for each model that speaks."""
    found = await in_thread("voices", _rows, front)
    return {"object": "list", "data": found, "voices": sorted({row["id"] for row in found})}


def _rows(front: FrontState) -> list[dict[str, Any]]:
    models = [
        (name, config)
        for capability in front.table.capabilities.values()
        if capability.role == ROLE
        for name, config in capability.models.items()
    ]
    return [
        {
            "id": voice,
            "object": "audio.voice",
            "name": voice,
            "created_at": front.started_unix_s,
            "model": name,
        }
        for name, config in models
        for voice in voice_files.voices(name, config)
    ]
