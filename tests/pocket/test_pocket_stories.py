"""Rules of stories, and the stories that the shipped items take from."""

from __future__ import annotations

from typing import Any

import pytest

from moe_lab.errors import UserError
from moe_lab.evaluation.harnesses.stories import rules_kept
from tools.pocket.examples import Example

STORY = "One day Mira walked to the mill. There she found a lamp. Mira felt happy. They all went home."


@pytest.mark.parametrize(
    ("rule", "story", "kept"),
    [
        ({"rule": "mentions", "text": "lamp"}, STORY, True),
        ({"rule": "mentions", "text": "amp"}, STORY, False),
        ({"rule": "mentions", "text": "lamp"}, "Two lamps.", False),
        ({"rule": "opens_with", "text": "Mira"}, STORY, True),
        ({"rule": "opens_with", "text": "lamp"}, STORY, False),
        ({"rule": "opens_with", "text": "Mira"}, "", False),
        ({"rule": "ends_with", "text": "They all went home."}, STORY + "\n", True),
        ({"rule": "ends_with", "text": "They all went home."}, STORY + " Then", False),
        ({"rule": "sentences", "least": 4}, STORY, True),
        ({"rule": "sentences", "least": 5}, STORY, False),
        ({"rule": "sentences", "least": 5}, STORY + " And then", False),
        ({"rule": "no_repeats"}, STORY, True),
        ({"rule": "no_repeats"}, STORY + " There she found a lamp.", False),
        ({"rule": "no_repeats"}, "lamp lamp lamp", False),
    ],
)
def test_rules(rule: dict[str, Any], story: str, kept: bool) -> None:
    assert rules_kept(story, [rule]) == [kept]


def test_mistakes_in_a_checklist_are_named() -> None:
    with pytest.raises(UserError, match="did you mean mentions"):
        rules_kept(STORY, [{"rule": "mention", "text": "Tom"}])
    with pytest.raises(UserError, match="sentences does not take"):
        rules_kept(STORY, [{"rule": "sentences", "most": 3}])


def test_the_stories_of_the_world_keep_all_rules(items: dict[str, list[Example]]) -> None:
    for example in items["wildbench"]:
        assert all(rules_kept(example.answer, example.details["checklist"]))
        assert not any(rules_kept("", example.details["checklist"]))
