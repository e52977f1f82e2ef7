"""How a table is written: as CSV, Markdown, LaTeX and HTML."""

from __future__ import annotations

import dataclasses
from io import StringIO

import numpy as np
import pandas as pd
import pytest

from analysis.render import table as rendering
from analysis.render.table import Table


def made_up_table() -> Table:
    frame = pd.DataFrame({"Criterion": ["Unpruned", "MAN", "REAP", "EAN"], "GSM8K": [0.9, 0.5, 0.5, np.nan]})
    low = pd.DataFrame({"GSM8K": [0.8, 0.4, 0.4, np.nan]})
    return Table(
        name="t",
        title="A 50 % table",
        caption="It_s caption.",
        frame=frame,
        formats={"GSM8K": "{:.3f}"},
        best={"GSM8K": "max"},
        low=low,
        high=low + 0.2,
    )


def test_csv_has_full_precision_intervals_and_empty_gaps() -> None:
    back = pd.read_csv(StringIO(rendering.csv(made_up_table())))
    assert list(back) == ["Criterion", "GSM8K", "GSM8K low", "GSM8K high"]
    assert np.isnan(back["GSM8K"][3]) and back["GSM8K high"][1] == pytest.approx(0.6)


def test_markdown_marks_the_best_and_explains_the_gap() -> None:
    made = rendering.markdown(made_up_table())
    assert "| MAN | **0.500** |" in made and "| REAP | **0.500** |" in made, "ties are all best"
    assert "| Unpruned | 0.900 |" in made, "the unpruned model does not compete"
    assert "| EAN | – |" in made and rendering.GAP_NOTE in made
    whole = dataclasses.replace(made_up_table(), frame=made_up_table().frame.fillna(0.25))
    assert rendering.GAP_NOTE not in rendering.markdown(whole)


def test_latex_is_booktabs_with_special_characters_escaped() -> None:
    made = rendering.latex(made_up_table())
    for words in (r"\toprule", r"\midrule", r"\bottomrule", r"\textbf{0.500}", r"It\_s", r"50 \%", r"\label{tab:t}"):
        assert words in made
    assert "textbf{0.900}" not in made


def test_html_has_sort_keys_and_intervals() -> None:
    made = rendering.html(made_up_table())
    assert 'data-key="0.9"' in made and 'data-key=""' in made
    assert "<small>0.40 to 0.60</small>" in made
    nasty = dataclasses.replace(
        made_up_table(), frame=pd.DataFrame({"Criterion": ["<script>"], "GSM8K": [0.5]}), low=None
    )
    assert "<script>" not in rendering.html(nasty)
