"""Prompts that ask for JSON, each with its schema: made up by rule, the same on every run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

WORDS = ("red", "green", "blue", "small", "large", "new", "used", "open", "closed", "soft", "hard")
THINGS: Mapping[str, tuple[str, ...]] = {
    "book": ("title", "author", "pages", "genre", "in_print", "year", "keywords"),
    "recipe": ("name", "minutes", "servings", "ingredients", "vegetarian", "difficulty"),
    "weather report": ("place", "degrees", "sky", "wind", "warnings", "raining"),
    "train ticket": ("origin", "destination", "platform", "price", "refundable", "seat"),
    "museum": ("name", "city", "rooms", "free_entry", "themes", "founded"),
    "bicycle": ("brand", "colour", "gears", "price", "electric", "parts"),
    "song": ("title", "artist", "seconds", "genre", "live", "moods"),
    "house plant": ("species", "height", "water", "flowering", "pests", "light"),
    "job offer": ("role", "company", "hours", "remote", "skills", "level"),
    "football match": ("home", "away", "goals", "extra_time", "scorers", "stage"),
    "mountain": ("name", "country", "metres", "snow", "routes", "season"),
    "restaurant": ("name", "dish", "tables", "outdoor", "tags", "price_class"),
    "phone": ("model", "maker", "storage", "dual_sim", "colours", "condition"),
    "lecture": ("topic", "speaker", "minutes", "recorded", "chapters", "level"),
    "pet": ("name", "animal", "age", "vaccinated", "toys", "size"),
    "hotel room": ("number", "beds", "view", "balcony", "extras", "price"),
}
KINDS = ("text", "choice", "whole", "number", "switch", "list", "object")


@dataclass(frozen=True)
class JsonTask:
    """A prompt, and the schema that its answer must follow."""

    id: str
    prompt: str
    schema: Schema


def json_tasks(count: int = 200) -> list[JsonTask]:
    """The first `count` tasks; every longer list begins with the shorter ones."""
    tasks = []
    names = list(THINGS)
    for number in range(count):
        chance = random.Random(f"json task {number}")
        thing = names[number % len(names)]
        fields = chance.sample(THINGS[thing], chance.randint(2, 4))
        schema = an_object(chance, fields, nested=True)
        listed = ", ".join(fields[:-1]) + f" and {fields[-1]}"
        prompt = f"Make up a {thing}. Answer with JSON that has the fields {listed}."
        tasks.append(JsonTask(f"json-{number:03d}", prompt, schema))
    return tasks


def an_object(chance: random.Random, fields: list[str], *, nested: bool) -> Schema:
    kinds = KINDS if nested else KINDS[:-1]
    required = [field for field in fields if chance.random() < 0.8]
    return {
        "type": "object",
        "properties": {field: a_value(chance, chance.choice(kinds)) for field in fields},
        "required": required or fields[:1],
        "additionalProperties": False,
    }


def a_value(chance: random.Random, kind: str) -> Schema:
    match kind:
        case "text":
            return {"type": "string", "minLength": 1, "maxLength": chance.choice([12, 24])}
        case "choice":
            return {"enum": chance.sample(WORDS, chance.randint(2, 5))}
        case "whole":
            low = chance.choice([0, 1, 10])
            return {"type": "integer", "minimum": low, "maximum": low + chance.choice([9, 99, 999])}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": chance.choice([1, 50, 1000])}
        case "switch":
            return {"type": "boolean"}
        case "list":
            item = a_value(chance, chance.choice(["choice", "whole", "text"]))
            return {"type": "array", "items": item, "minItems": 1, "maxItems": 3}
        case _:
            return an_object(chance, chance.sample(["kind", "count", "note"], 2), nested=False)


def is_valid(value: Any, schema: Schema) -> bool:
    """Whether a parsed value follows a schema of this file; nothing else is understood."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(is_valid(item, known[name]) for name, item in value.items())
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(is_valid(item, schema["items"]) for item in value)
            )
        case "string":
            return (
                isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
            )
        case "boolean":
            return isinstance(value, bool)
        case kind:
            numeric = int if kind == "integer" else int | float
            return (
                isinstance(value, numeric)
                and not isinstance(value, bool)
                and schema["minimum"] <= value <= schema["maximum"]
            )
