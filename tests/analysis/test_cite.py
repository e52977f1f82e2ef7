"""`moe-lab cite`: BibTeX of the papers of a study."""

import re
from pathlib import Path

import pytest
from synthetic import write_store

from moe_lab import __main__ as command_line
from moe_lab.errors import UserError


def test_the_papers_of_a_study_are_cited(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_store(
        tmp_path / "store",
        name="s",
        criteria=("reap", "mone_freq"),
        allocations=("evolutionary spec dec", "coverage, smoothing log"),
    )
    assert command_line.main(["cite", "s", f"store={tmp_path / 'store'}"]) == 0
    output = capsys.readouterr().out
    assert re.findall(r"eprint = {(.*)}", output) == ["2606.15716", "2606.18304", "2510.13999"]
    assert "{{EvoESAP" in output
    assert "title = {{REAP}}" in output and "{{How to Score Experts" in output
    assert command_line.main(["cite"]) == 0
    keys = re.findall(r"^@\w+{(.*),$", capsys.readouterr().out, re.MULTILINE)
    assert len(keys) == len(set(keys)) > 10
    with pytest.raises(UserError, match="study=other"):
        command_line.main(["cite", "other", f"store={tmp_path / 'store'}"])
