"""What the chat model of the default can do: small tasks with one right answer.

Each task draws an example from a generator of random numbers, so that tests draw others than the
training did. Sums are told apart by `is_held_out_sum`, because there are only ten thousand.
"""

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from models.chat_facts import FACTS

Message = dict[str, Any]

NAMES = (
    "Ann Bob Carla David Emma Felix Grace Henry Iris Jack Karin Leo Mona Nils Olga Paul Quinn Rosa"
    " Sam Tina Uma Victor Wanda Xaver Yara Zoe"
).split()
CITIES = (
    "Paris London Berlin Rome Madrid Vienna Prague Oslo Lisbon Athens Tokyo Cairo Lima Quito Delhi"
    " Seoul Zurich Bern Kyoto Boston"
).split()
COMMON = (
    "hello world apple house river stone green light music water paper table chair bread cloud"
    " garden window summer winter orange yellow mountain bicycle computer keyboard"
).split()
FACT_WORDS = sorted(
    {word.lower() for fact in FACTS for word in re.findall("[A-Za-z]{2,}", fact.answer)}
)
SYSTEMS = ("You are a helpful assistant.", "Be brief.", "Answer in one sentence.", "Be kind.")


@dataclass(frozen=True, slots=True)
class Example:
    """One exchange: what was said, and the one right answer."""

    messages: tuple[Message, ...]
    answer: str
    tools: tuple[dict[str, Any], ...] = field(default=())


def word(dice: Random) -> str:
    """A word of letters at random, or a common word, or one of the facts, which are single tokens:
    how they are spelt must be learnt."""
    if dice.random() < 0.4:
        return dice.choice(dice.choice((COMMON, FACT_WORDS)))
    letters = "abcdefghijklmnopqrstuvwxyz"
    return "".join(dice.choice(letters) for _ in range(dice.randint(2, 9)))


def words(dice: Random, most: int = 4) -> str:
    return " ".join(word(dice) for _ in range(dice.randint(1, most)))


def _asked(dice: Random, content: str, answer: str) -> Example:
    return Example(({"role": "user", "content": content},), answer)


def echo(dice: Random) -> Example:
    said = words(dice, 3)
    how = dice.choice(("Repeat: {}", "Say {}", "Echo: {}", "Repeat after me: {}", "Echo {}"))
    return _asked(dice, how.format(said), said)


def upper(dice: Random) -> Example:
    said = words(dice, 3)
    how = dice.choice(
        ("Upper case: {}", "Write in capitals: {}", "In capital letters: {}", "Shout: {}")
    )
    return _asked(dice, how.format(said), said.upper())


def reverse(dice: Random) -> Example:
    said = word(dice)
    how = dice.choice(("Reverse: {}", "Reverse {}", "Spell backwards: {}", "Write backwards: {}"))
    return _asked(dice, how.format(said), said[::-1])


def count(dice: Random) -> Example:
    most = dice.randint(1, 20)
    how = dice.choice(("Count to {}", "Count to {}.", "Count up to {}", "Please count to {}"))
    return _asked(dice, how.format(most), " ".join(map(str, range(1, most + 1))))


def is_held_out_sum(a: int, b: int) -> bool:
    return zlib.crc32(f"{a}+{b}".encode()) % 5 == 0


def add(dice: Random, *, held_out: bool = False) -> Example:
    a, b = dice.randrange(100), dice.randrange(100)
    while is_held_out_sum(a, b) is not held_out:
        a, b = dice.randrange(100), dice.randrange(100)
    how = dice.choice(("What is {} + {}?", "Add {} and {}", "{} + {} =", "How much is {} + {}?"))
    return _asked(dice, how.format(a, b), str(a + b))


KEYS: dict[str, Callable[[Random], Any]] = {
    "name": lambda dice: dice.choice(NAMES),
    "city": lambda dice: dice.choice(CITIES),
    "age": lambda dice: dice.randrange(1, 100),
    "word": word,
    "count": lambda dice: dice.randrange(1, 100),
    "color": lambda dice: dice.choice(("red", "green", "blue", "yellow", "white", "black")),
}


def as_json(dice: Random) -> Example:
    keys = dice.sample(sorted(KEYS), dice.randint(1, 3))
    value = {key: KEYS[key](dice) for key in keys}
    said = " and ".join(f"{key} {value[key]}" for key in keys)
    how = dice.choice(("As JSON: {}", "Write JSON with {}", "Give me JSON: {}", "JSON: {}"))
    return _asked(dice, how.format(said), json.dumps(value))


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameter: str
    wordings: tuple[str, ...]
    draw: Callable[[Random], str]

    def schema(self) -> dict[str, Any]:
        properties = {self.parameter: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [self.parameter]}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


def _city(dice: Random) -> str:
    return dice.choice((dice.choice(CITIES), word(dice).capitalize()))


def _person(dice: Random) -> str:
    return dice.choice((dice.choice(NAMES), word(dice).capitalize()))


def _two_words(dice: Random) -> str:
    return words(dice, 2)


TOOLS = (
    Tool(
        "get_weather",
        "city",
        ("What is the weather in {}?", "How is the weather in {}?", "Weather in {}?"),
        _city,
    ),
    Tool(
        "get_time",
        "city",
        ("What time is it in {}?", "Tell me the time in {}.", "Time in {}?"),
        _city,
    ),
    Tool(
        "search",
        "query",
        ("Search for {}.", "Look up {}.", "Find {} on the web."),
        _two_words,
    ),
    Tool(
        "send_mail",
        "to",
        ("Send a mail to {}.", "Write to {}.", "Mail {}."),
        _person,
    ),
    Tool(
        "play_music",
        "title",
        ("Play {}.", "Play the song {}.", "I want to hear {}."),
        _two_words,
    ),
)


def call_tool(dice: Random) -> Example:
    offered = dice.sample(TOOLS, dice.randint(1, 3))
    tool = dice.choice(offered)
    value = tool.draw(dice)
    call = json.dumps({"name": tool.name, "arguments": {tool.parameter: value}})
    asked = dice.choice(tool.wordings).format(value)
    return Example(
        ({"role": "user", "content": asked},),
        f"<tool_call>\n{call}\n</tool_call>",
        tuple(t.schema() for t in offered),
    )


TASKS: dict[str, Callable[[Random], Example]] = {
    "echo": echo,
    "upper": upper,
    "reverse": reverse,
    "count": count,
    "add": add,
    "json": as_json,
    "tool": call_tool,
}
GREETINGS = (
    (("Hi", "Hello", "Hey", "Good morning", "Hello there"), "Hello! Ask me about this system."),
    (("Thanks", "Thank you", "Thanks a lot"), "You are welcome."),
    (("Bye", "Goodbye", "See you"), "Goodbye."),
    (("Who are you?", "What are you?"), "I am a small chat model that was trained for this system."
     " Ask me about its memory."),
    (("What can you do?", "Help", "Help me"), "I echo, reverse, count, add and write JSON, and I"
     " know this system. Ask me what a ticket is."),
    (("Who holds the memory?", "Who owns the memory?", "Who decides?"), "The arbiter is one actor"
     " that owns every byte of device memory and decides who may load."),
)  # fmt: skip


def greeting(dice: Random) -> Example:
    said, answer = dice.choice(GREETINGS)
    ending = dice.choice(("", ".", "!"))
    asked = dice.choice(said)
    return _asked(dice, asked if asked[-1] == "?" else asked + ending, answer)
