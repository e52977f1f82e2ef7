"""Conversations with function calls: calibration text and benchmark of the pocket model that calls
functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import jinja2

from tools.pocket.examples import END_OF_TEXT, Example, held_out
from tools.pocket.world import ANIMALS, DAYS, MEN, OBJECTS, PLACES, RELATIONS, WOMEN, World, words

SKILL = "function_calls"
# A model this small learns to copy a word only after it has read it thousands of times, and names
# last, so conversations use only a part of the world and few of its people.
PEOPLE = WOMEN[::3] + MEN[::3]
FEW_PEOPLE = PEOPLE[::3]
THINGS = OBJECTS[:10]
NUMBERS = tuple(range(2, 60))
_VALUES = {relation.name: relation.values for relation in RELATIONS}


@dataclass(frozen=True)
class Function:
    """A function, with the values of its parameters, and sentences that request a call of it."""

    name: str
    description: str
    values: Mapping[str, Sequence[str | int]]
    requests: tuple[str, ...]

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The description of the function and its parameters, with types of JSON schema."""
        properties = {
            name: {"type": "integer" if isinstance(values[0], int) else "string"}
            for name, values in self.values.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"name": self.name, "description": self.description, "parameters": parameters}


@dataclass(frozen=True)
class Call:
    """A call of a function, with the values of its parameters in their order."""

    function: Function
    values: tuple[str | int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.function.name, *self.values)

    @property
    def arguments(self) -> dict[str, str | int]:
        return dict(zip(self.function.values, self.values, strict=True))

    def request(self, random: Random) -> str:
        """A random sentence that requests this call."""
        sentence = random.choice(self.function.requests).format(**self.arguments)
        return sentence[0].upper() + sentence[1:]


FUNCTIONS = (
    Function(
        "buy", "Buys fruit at the market.",
        {
            "person": PEOPLE,
            "fruit": words("apples pears plums nuts cherries grapes"),
            "count": NUMBERS,
        },
        (
            "{person} buys {count} {fruit}.", "{count} {fruit} for {person}, please.",
            "Buy {count} {fruit} for {person}.",
        ),
    ),
    Function(
        "sell", "Sells a thing for coins.",
        {"person": PEOPLE, "thing": THINGS, "price": NUMBERS},
        (
            "{person} sells a {thing} for {price} coins.", ("For {price} coins {person} sells a "
                                                            "{thing}."),
            "A {thing} of {person} is sold for {price} coins.",
        ),
    ),
    Function(
        "give", "Gives a thing to somebody.",
        {"giver": PEOPLE, "receiver": PEOPLE, "thing": THINGS},
        (
            "{giver} gives a {thing} to {receiver}.", "{giver} gives {receiver} a {thing}.",
            "{receiver} gets a {thing} from {giver}.",
        ),
    ),
    Function(
        "walk", "Lets somebody walk to a place.",
        {"person": PEOPLE, "place": PLACES, "day": DAYS},
        (
            "{person} walks to the {place} on {day}.", "On {day} {person} walks to the {place}.",
            "A walk of {person} to the {place} on {day}.",
        ),
    ),
    Function(
        "feed", "Feeds an animal.",
        {"person": PEOPLE, "animal": ANIMALS[:8], "food": _VALUES["food"]},
        (
            "{person} feeds the {animal} with {food}.", ("The {animal} of {person} is fed with "
                                                         "{food}."),
            "Feed {food} to the {animal} of {person}.",
        ),
    ),
    Function(
        "paint", "Paints a thing in a colour.",
        {"person": PEOPLE, "thing": THINGS, "colour": _VALUES["colour"]},
        (
            "{person} paints the {thing} {colour}.", "The {thing} of {person} is painted {colour}.",
            "Paint the {thing} of {person} in {colour}.",
        ),
    ),
)  # fmt: skip
KINDS = {"simple": 3, "multiple": 3, "parallel": 3, "irrelevance": 1}
"""Kind of conversation -> its weight. simple: one call, one function is available; multiple: one
call, several functions are available; parallel: two calls of one function; irrelevance: no call, as
no available function fits."""
REFUSAL = "No function fits."

TEMPLATE = (
    "{% for tool in tools or [] %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})\n"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "Answer:{{ ' ' + message.content if message.content else '' }}"
    "{% for call in message.tool_calls or [] %}"
    " <tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson "
    "}}</tool_call>"
    f"{{% endfor %}}{END_OF_TEXT}"
    "{% else %}{{ message.content }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)
"""The chat template: names of functions with their parameters, then the messages, with calls in the
format of Qwen models."""


def _compiled() -> jinja2.Template:
    """The chat template, compiled with those settings of transformers that it uses."""
    environment = jinja2.Environment()
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return environment.from_string(TEMPLATE)


_TEMPLATE = _compiled()


def _call(
    random: Random, function: Function, people: Sequence[str | int], benchmark: bool | None = None
) -> Call:
    """A random call whose values all differ. benchmark: whether it is a held-out call; None for any
    call."""
    while True:
        drawn = (
            random.choice(people if values is PEOPLE else values)
            for values in function.values.values()
        )
        call = Call(function, tuple(drawn))
        fits = benchmark is None or held_out(SKILL, call.key) == benchmark
        if fits and len(set(call.values)) == len(call.values):
            return call


def conversation(world: World, random: Random, people: Sequence[str] = FEW_PEOPLE) -> Example:
    """A conversation: a request with available functions, and the calls that answer it.

    The key of the example is the first call, or the requested one if no function fits. A second
    call is held out if and only if the first is."""
    kind = random.choices(list(KINDS), list(KINDS.values()))[0]
    function = random.choice(FUNCTIONS)
    calls = [_call(random, function, people)]
    if kind == "parallel":
        is_held_out = held_out(SKILL, calls[0].key)
        calls.append(_call(random, function, people, is_held_out))
    others = random.sample([other for other in FUNCTIONS if other != function], 2)
    count = {
        "simple": 0,
        "multiple": random.choice((1, 2)),
        "parallel": random.choice((0, 1)),
        "irrelevance": 2,
    }[kind]
    available = others[:count] if kind == "irrelevance" else [function, *others[:count]]
    random.shuffle(available)
    request = " ".join(call.request(random) for call in calls)
    tools = [{"type": "function", "function": tool.schema} for tool in available]
    reply: dict[str, Any] = {"role": "assistant", "content": REFUSAL}
    if kind != "irrelevance":
        tool_calls = [
            {"function": {"name": call.function.name, "arguments": call.arguments}}
            for call in calls
        ]
        reply = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    messages = [{"role": "user", "content": request}, reply]
    text = _TEMPLATE.render(messages=messages, tools=tools)
    head, separator, answer = text.removesuffix(END_OF_TEXT).rpartition("\nAnswer:")
    details = {"kind": kind, "tools": tools, "messages": messages, "calls": calls}
    return Example(SKILL, calls[0].key, head + separator, answer, details=details)


def among_many(world: World, random: Random) -> Example:
    """As `conversation`, with more people."""
    return conversation(world, random, PEOPLE)
