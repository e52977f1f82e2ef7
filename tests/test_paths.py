from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_lab.errors import UserError
from moe_lab.paths import resolve, shipped


def test_shipped_models_and_files_are_found() -> None:
    assert (Path(resolve("pocket:olmoe")) / "config.json").is_file()
    assert Path(resolve("pocket:calibration/general.jsonl")).is_file()
    assert all(path.exists() for path in shipped().values())


@pytest.mark.parametrize("path", ["allenai/OLMoE-1B-7B-0924", "/some/folder", "model"])
def test_other_paths_stay(path: str) -> None:
    assert resolve(path) == path


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("pocket:olmo", "pocket:olmoe"),
        ("pocket:calibration/genral.jsonl", "pocket:calibration/general.jsonl"),
        ("pocket:../data/olmoe", "pocket:olmoe"),
    ],
)
def test_unknown_names_get_the_nearest(path: str, nearest: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {re.escape(nearest)}"):
        resolve(path)
