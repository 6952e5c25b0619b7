"""A prefix's tokens are a prefix of every chat that goes on from it, by templates of many kinds."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deployments.engines.vllm.routes.chat_endings import ENDINGS, LOOSE_COUNT, common, endings
from models import make_models
from models.chat_facts import FACTS
from models.chat_tokens import TEMPLATE as SMALL
from models.chat_tokens import tokenizer as made
from tests.support.examples import examples

pytestmark = pytest.mark.spec("G1")

# ChatML, with a system prompt of its own and the tools behind the client's, as Qwen has it
CHATML = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "{% else %}<|im_start|>system\nYou are helpful.{% endif %}"
    "{% if tools %}\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% for m in messages %}{% if not (loop.first and m.role == 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The system prompt inside the first turn, user and assistant by turns, as Llama 2 has it
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {% if loop.first and s %}<<SYS>>\n{{ s }}\n<</SYS>>\n\n"
    "{% endif %}{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} </s>{% endif %}"
    "{% endfor %}"
)
# No marks at all between what is said, so that tokens may reach over the border
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "tiny-chat": make_models.TEMPLATE,
    "small-chat": SMALL,
    "chatml": CHATML,
    "llama-2": LLAMA2,
    "bare": BARE,
}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"properties": {}}}}


def merging() -> PreTrainedTokenizerFast:
    """A tokenizer that joins what often stands together, white space and punctuation too."""
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator([str(rows) for rows in (FACTS, TEMPLATES, SYSTEM, ENDINGS)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


@pytest.fixture(scope="module", params=[made, merging], ids=["words", "merges"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = request.param()
    return found


def rendered(tokenizer: PreTrainedTokenizerFast, template: str, chat: dict[str, Any]) -> list[int]:
    text = tokenizer.apply_chat_template(
        chat["messages"],
        tools=chat.get("tools") or None,
        chat_template=template,
        add_generation_prompt=True,
        tokenize=False,
    )
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def prefix_of(
    tokenizer: PreTrainedTokenizerFast, template: str, prefix: dict[str, Any], role: str = "user"
) -> list[int]:
    return common([rendered(tokenizer, template, chat) for chat in endings(prefix, role)])


SYSTEM = {"role": "system", "content": "Answer in one word, and play music where it is asked for."}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
@given(said=st.text(min_size=1, max_size=20), later=st.text(max_size=20))
@settings(max_examples=examples(30))
def test_every_chat_begins_with_its_prefix(
    tokenizer: PreTrainedTokenizerFast, template: str, tools: list[Any], said: str, later: str
) -> None:
    prefix: dict[str, Any] = {"messages": [SYSTEM]} | ({"tools": tools} if tools else {})
    tokens = prefix_of(tokenizer, template, prefix)
    turns = [{"role": "user", "content": said}]
    if later:
        turns += [{"role": "assistant", "content": later}, {"role": "user", "content": said}]
    real = rendered(tokenizer, template, {**prefix, "messages": [SYSTEM, *turns]})
    assert real[: len(tokens)] == tokens


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_prefix_holds_what_is_stable_but_for_its_last_tokens(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    tokens = prefix_of(tokenizer, template, {"messages": [SYSTEM]})
    assert SYSTEM["content"][:-12] in tokenizer.decode(tokens)


def test_tools_that_vary_end_the_prefix_where_the_template_has_them(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    varying = {"messages": [SYSTEM], "tools": None}
    behind = tokenizer.decode(prefix_of(tokenizer, CHATML, varying))
    assert SYSTEM["content"] in behind and "function" not in behind.partition("name")[2]
    assert len(prefix_of(tokenizer, SMALL, varying)) < 3  # in front of the system prompt


def test_template_that_wants_turns_is_rendered_with_the_role_that_is_due(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    asked = {"messages": [{"role": "user", "content": "What is a lease?"}]}
    tokens = prefix_of(tokenizer, LLAMA2, asked, "assistant")
    assert "What is a lease?" in tokenizer.decode(tokens)


def test_common_beginning_of_rows_without_its_loose_end() -> None:
    long = list(range(100))
    assert common([[*long, 3], [*long, 4], [*long]]) == long[:-LOOSE_COUNT]
    assert common([long, long]) == long[:-LOOSE_COUNT]
    assert common([[1], [2]]) == common([[], [1]]) == common([[1, 2], [1, 2]]) == []
