"""Marks of figures, drawn from frames made by hand."""

from typing import Any

import pandas as pd

from moe_lab.analysis.render import marks


def row_labels(labels: list[Any]) -> list[str]:
    """Tick labels of the rows of a heat map with one column."""
    rows = pd.DataFrame({"panel": "", "x": "a", "y": labels, "colour": "none", "text": ""})
    [axes] = marks.heat_map(rows).axes
    return [label.get_text() for label in axes.get_yticklabels()]


def test_all_names_of_categories_are_shown() -> None:
    names = [f"benchmark {number}" for number in range(16)]
    assert row_labels(names) == names


def test_of_many_layers_every_second_or_third_is_named() -> None:
    assert row_labels(list(range(12))) == list(map(str, range(12)))
    assert row_labels(list(range(36))) == list(map(str, range(0, 36, 3)))


def test_lines_over_two_layers_are_not_drawn() -> None:
    rows = pd.DataFrame({"panel": "", "label": "a", "layer": [5, 1, 2], "y": [3.0, 1.0, 2.0]})
    figure = marks.layer_figure("f", "", "", rows, marks.Axis())
    assert figure is not None
    [line] = figure.drawing.axes[0].get_lines()
    assert line.get_xydata().tolist() == [[1, 1], [2, 2], [5, 3]]
    assert marks.layer_figure("f", "", "", rows[:2], marks.Axis()) is None


def test_texts_of_squares_are_left_out_where_they_do_not_fit() -> None:
    texts = ["REAP, evolutionary", "MAN = REAP", "seven lines " * 4, *["REAP"] * 6]
    rows = pd.DataFrame({"panel": "", "x": range(9), "y": 0, "colour": "none", "text": texts})
    [axes] = marks.heat_map(rows).axes
    # a ninth of the width, without the inch for labels, has space for 7 letters
    assert [text.get_text() for text in axes.texts] == ["MAN =\nREAP", *["REAP"] * 6]
