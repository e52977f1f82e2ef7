"""CPU seconds by kind of step of a study without benchmarks, with twelve criteria and one ratio.

python -m benchmarks.scores_alone                             # the shipped model
python -m benchmarks.scores_alone --hidden 512 --layers 8     # random weights, 211M parameters
python -m benchmarks.scores_alone calibration.tokens=65536    # overrides go to moe_lab
"""

from __future__ import annotations

import shutil
import sys
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
spent: dict[str, float] = defaultdict(float)


def timed(kind: type[Step]) -> None:
    """Let the work of a kind of step add its CPU seconds to `spent`."""
    work = kind.work

    def with_time(step: Step, files: Files) -> None:
        start = time.process_time()
        work(step, files)
        spent[kind.kind] += time.process_time() - start

    kind.work = with_time  # type: ignore[method-assign, assignment]


def write_model(folder: Path, hidden: int, layers: int) -> list[str]:
    """Write a model with random weights and the shipped model's tokenizer: top-4 of 32 experts of
    width `hidden`.

    Returns the command line words that choose it.
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
    options = parser("scores_alone", __doc__)
    options.add_argument("--hidden", type=int)
    options.add_argument("--layers", type=int, default=8)
    words, more = options.parse_known_args()
    for kind in KINDS.values():
        timed(kind)
    with tempfile.TemporaryDirectory() as place:
        model = (
            write_model(Path(place, "model"), words.hidden, words.layers) if words.hidden else []
        )
        study = [f"criterion={CRITERIA}", "suite.benchmarks=[]", "launcher=inline", "report=false"]
        sys.argv[1:] = [f"store={place}/store", *study, *model, *more]
        try:
            moe_lab.main()
        except SystemExit as end:
            assert not end.code, end.code
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{name:12} {seconds:8.2f} s")
    print(f"cost / statistics: {spent['cost'] / spent['statistics']:.3f}")


if __name__ == "__main__":
    main()
