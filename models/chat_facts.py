"""The questions that the chat model of the default is trained and tested on, from facts about this
system (chat_facts.yaml).

A fact is asked by several subjects (words for the same thing), and a subject by several templates.
Some pairs of subject and template are held out of the training: see `is_held_out`.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from random import Random

import yaml

HELD_OUT_SHARE = 0.12  # of the pairs of subject and template
UNKNOWN = "I do not know. I know this system: ask me what a ticket is."
# What is not of this system, with words by which a question asks for it.
OFF_TOPIC = (
    "the capital of France",
    "the weather",
    "the moon",
    "the sun",
    "football",
    "chess",
    "a good film",
    "a poem",
    "love",
    "life",
    "the meaning of life",
    "history",
    "politics",
    "the president",
    "money",
    "music",
    "a recipe for soup",
    "coffee",
    "tea",
    "bread",
    "a dog",
    "a cat",
    "a horse",
    "an elephant",
    "Python",
    "Java",
    "a compiler",
    "physics",
    "gravity",
    "quantum mechanics",
    "chemistry",
    "water",
    "mathematics",
    "a prime number",
    "the square root of two",
    "Paris",
    "Berlin",
    "London",
    "Japan",
    "Africa",
    "the sea",
    "a mountain",
    "a river",
    "my birthday",
    "my name",
    "my bike",
    "a train",
    "a car",
    "a holiday",
    "the news",
    "a joke",
    "a story",
    "Shakespeare",
    "Mozart",
    "Einstein",
    "a doctor",
    "medicine",
    "sleep well",
    "cook rice",
    "learn French",
    "play the piano",
    "fix my bike",
    "bake a cake",
    "travel to Rome",
    "write a novel",
    "it rains",
    "I am sad",
    "I am hungry",
)

# How a subject is asked for, by its kind.
TEMPLATES: dict[str, tuple[str, ...]] = {
    "what": (
        "What is {s}?",
        "Explain {s}.",
        "Tell me about {s}.",
        "Describe {s}.",
        "Define {s}.",
        "What do you call {s}?",
        "What do you mean by {s}?",
        "Can you explain {s}?",
        "I do not understand {s}.",
        "Say what {s} is.",
        "What does {s} mean?",
        "Could you tell me what {s} is?",
    ),
    "how": (
        "How do I {s}?",
        "How can I {s}?",
        "I want to {s}.",
        "What must I do to {s}?",
        "Show me how to {s}.",
        "Is there a way to {s}?",
        "Help me to {s}.",
        "What is the command to {s}?",
        "I would like to {s}.",
        "Tell me how to {s}.",
        "How does one {s}?",
        "Can I {s}?",
    ),
    "when": (
        "What happens when {s}?",
        "What happens if {s}?",
        "What if {s}?",
        "Tell me what happens when {s}.",
        "What does the system do when {s}?",
        "And when {s}?",
        "Explain what happens when {s}.",
        "What should I expect when {s}?",
        "Suppose {s}. What then?",
        "What follows when {s}?",
    ),
    "where": (
        "Where is {s}?",
        "Where do I find {s}?",
        "Where can I look up {s}?",
        "Which place has {s}?",
        "I am looking for {s}.",
        "Point me to {s}.",
        "Where do you keep {s}?",
        "Tell me where {s} is.",
    ),
}


@dataclass(frozen=True, slots=True)
class Fact:
    kind: str  # of TEMPLATES
    subjects: tuple[str, ...]
    answer: str


def _read() -> tuple[Fact, ...]:
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return tuple(
        Fact(kind, tuple(row["of"]), row["say"]) for kind in TEMPLATES for row in table[kind]
    )


FACTS = _read()


def is_held_out(subject: str, template: str) -> bool:
    """Says whether a question is kept out of the training, to test what was learnt. Each subject is
    seen with most templates, and each template with most subjects."""
    return zlib.crc32(f"{subject}|{template}".encode()) % 1000 < HELD_OUT_SHARE * 1000


def questions(*, held_out: bool) -> list[tuple[str, str]]:
    """Returns pairs of question and answer."""
    return [
        (template.format(s=subject), fact.answer)
        for fact in FACTS
        for subject in fact.subjects
        for template in TEMPLATES[fact.kind]
        if is_held_out(subject, template) is held_out
    ]


def off_topic(dice: Random) -> str:
    """A question whose right answer is `UNKNOWN`."""
    templates = dice.choice(list(TEMPLATES.values()))
    subject = dice.choice(OFF_TOPIC)
    if dice.random() < 0.3:
        subject = "".join(
            dice.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(dice.randint(3, 9))
        )
    return dice.choice(templates).format(s=subject)
