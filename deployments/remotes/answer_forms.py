"""The form of a remote's answers, as far as this machine reads them: a client of another API than
the remote's gets them in its own words. Other fields are the remote's and go on as they are.

    check_whole("/v1/chat/completions", json.loads(raw))     # raises WrongForm
"""

from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from deployments.config.remotes_section import CHAT, COMPLETIONS, EMBEDDINGS


class WrongForm(Exception):
    """`place`: the field at fault, in no word of the remote's own."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] | None = None  # some servers write the object itself


class _ToolCall(BaseModel):
    function: _Function


class _Message(BaseModel):
    tool_calls: list[_ToolCall] | None = None


class _Choice(BaseModel):
    finish_reason: str | None = None


class _ChatChoice(_Choice):
    message: _Message | None  # null where a filter took it


class _TextChoice(_Choice):
    text: str


class _Answer(BaseModel):
    usage: dict[str, Any] | None = None


class _Chat(_Answer):
    choices: Annotated[list[_ChatChoice], Field(min_length=1)]


class _Completion(_Answer):
    choices: Annotated[list[_TextChoice], Field(min_length=1)]


class _Row(BaseModel):
    embedding: list[Any] | str


class _Vectors(_Answer):
    data: Annotated[list[_Row], Field(min_length=1)]


class _FunctionPiece(BaseModel):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _ToolCallPiece(BaseModel):
    index: int | None = None
    function: _FunctionPiece | None = None


class _Delta(BaseModel):
    tool_calls: list[_ToolCallPiece] | None = None


class _ChoicePiece(_Choice):
    delta: _Delta | None = None
    text: str | None = None


class _Event(_Answer):
    choices: list[_ChoicePiece] | None = None


_WHOLE: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(_Chat),
    COMPLETIONS: TypeAdapter(_Completion),
    EMBEDDINGS: TypeAdapter(_Vectors),
}
_EVENT: TypeAdapter[Any] = TypeAdapter(_Event)


def check_whole(path: str, answer: dict[str, Any]) -> None:
    """Raises WrongForm."""
    _check(_WHOLE[path], answer)


def check_event(answer: dict[str, Any]) -> None:
    """Raises WrongForm."""
    _check(_EVENT, answer)


def _check(form: TypeAdapter[Any], answer: dict[str, Any]) -> None:
    try:
        form.validate_python(answer, strict=True)
    except ValidationError as error:
        place = error.errors(include_url=False, include_input=False)[0]["loc"]
        raise WrongForm(".".join(str(part) for part in place)) from error
