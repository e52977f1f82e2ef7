"""Marks of figures, drawn from frames made by hand."""

from typing import Any

import pandas as pd

from analysis.render import marks


def row_labels(labels: list[Any]) -> list[str]:
    """Tick labels of the rows of a heat map with one column."""
    rows = pd.DataFrame({"panel": "", "x": "a", "y": labels, "colour": "none", "text": ""})
    [axes] = marks.heat_map(rows).axes
    return [label.get_text() for label in axes.get_yticklabels()]


def test_all_names_of_categories_are_shown() -> None:
    names = [f"benchmark {number}" for number in range(16)]
    assert row_labels(names) == names
    [axes] = marks.box_plots(
        pd.DataFrame({"panel": "", "label": names, "y": 0.5}), marks.Axis(), marks.Axis()
    ).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == names


def test_of_many_layers_every_second_or_third_is_named() -> None:
    assert row_labels(list(range(12))) == list(map(str, range(12)))
    assert row_labels(list(range(36))) == list(map(str, range(0, 36, 3)))


def test_texts_of_squares_are_left_out_where_they_do_not_fit() -> None:
    texts = ["REAP, evolutionary", "MAN = REAP", "seven lines " * 4, *["REAP"] * 6]
    rows = pd.DataFrame({"panel": "", "x": range(9), "y": 0, "colour": "none", "text": texts})
    [axes] = marks.heat_map(rows).axes
    # a ninth of the width, without the inch for labels, has space for 7 letters
    assert [text.get_text() for text in axes.texts] == ["MAN =\nREAP", *["REAP"] * 6]
