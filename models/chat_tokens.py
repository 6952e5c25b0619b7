"""The tokenizer of the chat model of the default, its template, and examples as tokens."""

import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.chat_facts import FACTS, TEMPLATES, UNKNOWN
from models.chat_tasks import GREETINGS, SYSTEMS, TOOLS, Example

BOS, EOS, PAD = 0, 1, 2
IGNORED = -100  # of labels, by torch's cross entropy
# What hermes' parser reads, and the names of tools in as few tokens as may be.
TEMPLATE = (
    "<s>"
    "{% for t in tools or [] %}tool: {{ t['function']['name'] }}("
    "{{ t['function']['parameters']['properties'] | join(', ') }})\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] or '' }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Whole words of what it is to say, and bytes for all else, so that it can spell."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    for token in (*alphabet, *_known_words()):
        vocabulary.setdefault(token, len(vocabulary))
    while len(vocabulary) % 64:
        vocabulary[f"<unused{len(vocabulary)}>"] = len(vocabulary)
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def _known_words() -> list[str]:
    """Words of questions and answers, as the tokenizer cuts them, each but once."""
    texts = [fact.answer for fact in FACTS] + [s for fact in FACTS for s in fact.subjects]
    texts += [t.replace("{s}", "") for forms in TEMPLATES.values() for t in forms]
    texts += [answer for _, answer in GREETINGS] + [" ".join(said) for said, _ in GREETINGS]
    texts += [w.replace("{}", "") for tool in TOOLS for w in tool.wordings]
    texts += ["user: assistant: tool: system: <tool_call> </tool_call> get_weather get_time search"]
    texts += ["send_mail play_music name arguments city query to title", *SYSTEMS]
    texts += ["Repeat Say Echo after me Upper case Write in capitals capital letters Shout Reverse"]
    texts += [" Spell backwards Count up to Please What is Add and How much As JSON with Give me"]
    texts += [" please Please hi Hi so well age word count color", UNKNOWN]
    texts += [" repeat say echo upper write in shout reverse spell count what add how as give"]
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {w for text in texts for w, _ in cut.pre_tokenize_str(text) if re.search("[A-Za-z]", w)}
    return sorted(w for w in words if len(w) > 1)


def encode(tok: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], list[int]]:
    """Returns tokens and labels: learnt is the answer and its end."""
    prompt = tok.apply_chat_template(
        list(example.messages),
        tools=list(example.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    asked = tok(prompt, add_special_tokens=False)["input_ids"]
    said = [*tok(example.answer, add_special_tokens=False)["input_ids"], EOS]
    return asked + said, [IGNORED] * len(asked) + said
