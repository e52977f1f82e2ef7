"""CPU seconds of each kind of step, in a study of twelve criteria and one ratio without benchmarks.

python -m benchmarks.scores_alone                             # the shipped model
python -m benchmarks.scores_alone --hidden 512 --layers 8     # random weights, 211M parameters
python -m benchmarks.scores_alone calibration.tokens=65536    # overrides go to moe_lab
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.measure import parser
from moe_lab import __main__ as moe_lab
from moe_lab.paths import resolve
from moe_lab.study.step import Step
from moe_lab.study.steps import KINDS
from moe_lab.study.steps.files import Files

CRITERIA = "frequency,seer,ean,reap,mone,man,msan,gate_ean,gate_energy,aimer,magnitude,random"
seconds_of_kind: dict[str, float] = defaultdict(float)
"""Kind of step -> CPU seconds of its steps so far."""


def time_steps(kind: type[Step]) -> None:
    """Patch a kind of step so that its work adds its CPU seconds to `seconds_of_kind`."""
    work = kind.work

    def timed_work(step: Step, files: Files) -> None:
        start = time.process_time()
        work(step, files)
        seconds_of_kind[kind.kind] += time.process_time() - start

    kind.work = timed_work  # type: ignore[method-assign, assignment]


def write_model(folder: Path, hidden: int, layers: int) -> list[str]:
    """Write a model with random weights and the shipped model's tokenizer: top-4 of 32 experts of
    width `hidden`.

    Returns the overrides that select it.
    """
    from transformers import AutoModelForCausalLM, OlmoeConfig

    source = Path(resolve("pocket:olmoe"))
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    config = OlmoeConfig.from_pretrained(source)
    config.update({"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers})
    config.update({"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64})
    config.update({"num_experts": 32, "num_experts_per_tok": 4})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    print(f"{model.num_parameters() / 1e6:.0f}M parameters")
    return ["model=local", f"model.path={folder}"]


def main() -> None:
    """Run the study and print the seconds of each kind of step."""
    options = parser("scores_alone", __doc__)
    options.add_argument("--hidden", type=int)
    options.add_argument("--layers", type=int, default=8)
    arguments, overrides = options.parse_known_args()
    for kind in KINDS.values():
        time_steps(kind)
    with tempfile.TemporaryDirectory() as folder:
        model: list[str] = []
        if arguments.hidden:
            model = write_model(Path(folder, "model"), arguments.hidden, arguments.layers)
        study = [f"criterion={CRITERIA}", "suite.benchmarks=[]", "launcher=inline", "report=false"]
        code = moe_lab.main([f"store={folder}/store", *study, *model, *overrides])
        assert not code, code
    for name, seconds in sorted(seconds_of_kind.items(), key=lambda item: -item[1]):
        print(f"{name:12} {seconds:8.2f} s")
    print(f"cost / statistics: {seconds_of_kind['cost'] / seconds_of_kind['statistics']:.3f}")


if __name__ == "__main__":
    main()
