"""Pictures through vLLM: what they show is told; their projections are cached by our identity."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from PIL import Image

from models.train_vision import QUESTIONS, WITHOUT_PICTURE, answer
from tests.support.drawings import FACTS, drawing, uri
from tests.support.engine_host import Child, Connection, ZygoteUnderTest, served, until

VLLM = "deployments.engines.vllm.engine:build"
MIB = 1 << 20
ARGS = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 * MIB,
    "limit_mm_per_prompt": {"image": 2},
    "mm_processor_cache_gb": 0.01,
}
ENTRIES, TERM_S = 4, 3.0


def sees(
    engines: ZygoteUnderTest, ticket: str, model: Path, slab: dict[str, Any] | None = None
) -> AbstractContextManager[Child]:
    return served(engines, ticket, VLLM, config(ticket, model, slab))


def config(ticket: str, model: Path, slab: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "model": str(model),
        "served_name": ticket,
        "engine_args": ARGS,
        "threads": 1,
        "slabs": {"picture": slab or {}},
    }


@pytest.fixture(scope="module")
def seeing(engines: ZygoteUnderTest, describer: Path) -> Iterator[Child]:
    with sees(engines, "seeing", describer) as child:
        yield child


def body(url: str, question: str = QUESTIONS["describe"][0], **more: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}, **more}
    content = [part, {"type": "text", "text": question}]
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 14,
    }


def told(child: Child, url: str, question: str = QUESTIONS["describe"][0], **more: Any) -> str:
    status, said = child.call("POST", "/v1/chat/completions", body(url, question, **more))
    assert status == 200, said
    return str(said["choices"][0]["message"]["content"]).strip()


def facts(child: Child, method: str = "GET") -> dict[str, int]:
    status, said = child.call(method, "/pictures")
    assert status == 200, said
    return dict(said)


class Counted:
    """What the cache counted since this began."""

    def __init__(self, child: Child) -> None:
        self.child, self.before = child, facts(child)

    def __call__(self) -> tuple[int, int]:
        now = facts(self.child)
        return now["hits"] - self.before["hits"], now["misses"] - self.before["misses"]


@pytest.mark.spec("H2")
def test_unseen_drawings_are_described_and_questions_answered(seeing: Child) -> None:
    numbers = range(0, len(FACTS), 8)  # every colour, shape and background
    right = [told(seeing, uri(drawing(n))) == answer("describe", FACTS[n]) for n in numbers]
    assert sum(right) >= len(right) - 1
    for kind in ("shape", "colour", "background"):
        found = [told(seeing, uri(drawing(n)), QUESTIONS[kind][1]) for n in numbers]
        wanted = [answer(kind, FACTS[n]) for n in numbers]
        assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= len(wanted) - 1


@pytest.mark.spec("H2")
def test_chat_without_a_picture_asks_for_one(seeing: Child) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "temperature": 0}
    status, said = seeing.call("POST", "/v1/chat/completions", asked)
    assert status == 200
    assert said["choices"][0]["message"]["content"].strip() == WITHOUT_PICTURE


@pytest.mark.spec("H8")
def test_equal_pixels_hit_whatever_the_file_and_the_question(seeing: Child) -> None:
    picture, count = drawing(1), Counted(seeing)
    told(seeing, uri(picture))
    assert count() == (0, 1)
    told(seeing, uri(picture))
    told(seeing, uri(picture), "which shape?")
    assert count() == (2, 1)
    for same in (uri(picture, "BMP"), uri(picture, "WEBP", lossless=True)):
        told(seeing, same)
    assert count() == (4, 1)
    told(seeing, uri(picture, "JPEG"))  # whose pixels differ
    assert count() == (4, 2)
    two = body(uri(picture))
    content = two["messages"][0]["content"]
    content.insert(0, content[0])
    assert seeing.call("POST", "/v1/chat/completions", two)[0] == 200
    assert count() == (6, 2)


@pytest.mark.spec("J1", "H2", "H8")
def test_picture_of_anthropics_messages_is_the_one_of_the_chat(seeing: Child) -> None:
    question, count = QUESTIONS["describe"][0], Counted(seeing)
    first = told(seeing, uri(drawing(11)))
    assert (blocks_told(seeing, [source(11)], question), count()) == (first, (1, 1))
    other = blocks_told(seeing, [source(12)], question)
    assert other == answer("describe", FACTS[12]) and count() == (1, 2)
    forged = source(12) | {"uuid": "mine"}
    assert blocks_told(seeing, [source(11) | {"uuid": "mine"}], question) == first
    assert (blocks_told(seeing, [forged], question), count()) == (other, (3, 2))


def source(number: int) -> dict[str, Any]:
    data = uri(drawing(number)).partition(",")[2]
    return {"type": "base64", "media_type": "image/png", "data": data}


def blocks_told(child: Child, sources: list[dict[str, Any]], question: str) -> str:
    """As Anthropic's clients ask."""
    blocks = [{"type": "image", "source": one} for one in sources]
    fields = {
        "model": "seeing",
        "messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": question}]}],
        "temperature": 0,
        "max_tokens": 14,
    }
    status, said = child.call("POST", "/v1/messages", fields)
    assert status == 200, said
    return str(said["content"][0]["text"]).strip()


@pytest.mark.spec("H8", "L2")
def test_forged_identity_gets_no_other_pictures_answer(seeing: Child) -> None:
    one, other = uri(drawing(2)), uri(drawing(150))
    honest = told(seeing, other)
    count = Counted(seeing)
    told(seeing, one, uuid="mine")
    assert told(seeing, other, uuid="mine") == honest
    assert count() == (1, 1)  # `other` was there, `one` was not
    exif = Image.Exif()
    exif[0xA420] = UUID(int=7).bytes  # ImageUniqueID, and DNG's ImageID beside it
    exif[Image.ExifTags.Base.ImageID] = UUID(int=7).bytes
    told(seeing, uri(drawing(3), exif=exif))
    assert told(seeing, uri(drawing(150), exif=exif)) == honest
    assert count() == (2, 2)


@pytest.mark.spec("H8")
def test_tenants_share_no_entry(seeing: Child) -> None:
    picture, count = uri(drawing(4)), Counted(seeing)
    for tenant, expected in (("a", (0, 1)), ("b", (0, 2)), ("a", (1, 2)), ("b", (2, 2))):
        asked(seeing, body(picture), tenant)
        assert count() == expected


def asked(child: Child, fields: dict[str, Any], tenant: str) -> None:
    """As the replica sends it: the front sets the tenant."""
    connection = Connection(child.path)
    headers = {"content-type": "application/json", "x-arbiter-tenant": tenant}
    connection.request("POST", "/v1/chat/completions", json.dumps(fields), headers)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200
    connection.close()


@pytest.mark.spec("H8")
def test_purge_empties_the_cache_and_a_sleep_does_too(seeing: Child) -> None:
    picture = uri(drawing(5))
    before = told(seeing, picture)
    assert facts(seeing)["entries"] > 0
    assert facts(seeing, "DELETE")["entries"] == 0
    count = Counted(seeing)
    assert told(seeing, picture) == before
    assert count() == (0, 1)
    assert seeing.call("POST", "/control/sleep")[0] == 200
    assert seeing.call("POST", "/control/wake")[1]["verified"] is True
    assert facts(seeing)["entries"] == 0
    assert told(seeing, picture) == before
    assert count() == (0, 2)


@pytest.mark.spec("C5", "H8")
def test_purge_of_an_engine_that_serves_empties_the_cache_and_it_serves_on(seeing: Child) -> None:
    picture = uri(drawing(13))
    before = told(seeing, picture)
    assert facts(seeing)["entries"] > 0
    assert seeing.call("POST", "/control/purge") == (200, {"purges": True})
    count = Counted(seeing)
    assert facts(seeing)["entries"] == 0
    assert (told(seeing, picture), count()) == (before, (0, 1))


@pytest.mark.spec("H8")
def test_cache_keeps_the_last_entries_and_none_beyond_the_term(
    engines: ZygoteUnderTest, describer: Path
) -> None:
    with sees(engines, "bounded", describer, {"entries": ENTRIES, "term_s": TERM_S}) as child:
        pictures = [uri(drawing(n)) for n in range(ENTRIES + 1)]
        count = Counted(child)
        for picture in pictures:
            told(child, picture)
            assert facts(child)["entries"] <= ENTRIES
        told(child, pictures[1])  # the first has left, the second has not
        assert count() == (1, ENTRIES + 1)
        told(child, pictures[0])
        assert count() == (1, ENTRIES + 2)
        until(lambda: facts(child)["entries"] == 0, 60)  # by the term alone: no request asks
        told(child, pictures[1])
        assert count() == (1, ENTRIES + 3)


@pytest.mark.spec("H2", "L2", "L3")
@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/x.png", "file:///etc/passwd", "data:image/png;base64,AAAA", "data:,"],
)
def test_engine_itself_refuses_what_is_no_picture(seeing: Child, url: str) -> None:
    status, said = seeing.call("POST", "/v1/chat/completions", body(url))
    assert (status, said["error"]["param"]) == (400, "messages[0].content[0].image_url")
    truncated = uri(drawing(6))[:200]
    assert seeing.call("POST", "/v1/chat/completions", body(truncated))[0] == 400
    told(seeing, uri(drawing(6)))


@pytest.mark.spec("H2", "L3")
def test_more_pictures_than_the_model_takes_are_400(seeing: Child) -> None:
    many = body(uri(drawing(7)))
    content = many["messages"][0]["content"]
    content[:0] = [content[0]] * 2
    assert seeing.call("POST", "/v1/chat/completions", many)[0] == 400
