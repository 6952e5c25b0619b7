"""Turns the messages of a chat, in the short forms that a person may write, into OpenAI's form."""

from collections.abc import Mapping
from typing import Any

from deployments.client.fields import Json, Messages
from deployments.client.media import Picture


def written(messages: Messages) -> list[Json]:
    """Returns the messages in OpenAI's form. A text alone is one message of the user; among the
    parts of a message a text is a text part, and a Picture an image part."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [_message(one) for one in messages]


def _message(message: Mapping[str, Any]) -> Json:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Picture):
        return {"type": "image_url", "image_url": {"url": part.uri}}
    return part
