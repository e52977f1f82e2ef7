"""Compare a criterion of your own with REAP: the experts that both drop, and the loss of a prompt
after pruning by each."""

import torch

import moe_lab
from moe_lab.criteria import Array, Layer, criterion


@criterion("loudest", needs=("statistics",), reference="this file")
def loudest(layer: Layer) -> Array:
    """The largest absolute activation of all channels of an expert."""
    return layer["channel_max"].max(axis=1)


model, tokenizer = moe_lab.load("pocket:olmoe", threads=1)
text = "pocket:calibration/general.jsonl"
statistics = moe_lab.calibrate(
    model, tokenizer, text, criteria=["loudest", "reap"], tokens=16_384, length=512
)
SOLUTION = (
    "Problem: Find term 6 of 7, 9, 11, ...\nSolution: 9-7=2. 2*5=10. 7+10=17. The answer is 17."
)
prompt = tokenizer(SOLUTION, return_tensors="pt").input_ids

dropped = {}
for name in ("loudest", "reap"):
    plan = moe_lab.plan(moe_lab.score(name, statistics), ratio=0.25)
    dropped[name] = {
        (number, expert) for number, layer in plan.layers.items() for expert in layer.dropped
    }
    with moe_lab.mask(model, plan), torch.no_grad():
        print(f"{name:8} loss of the prompt {model(prompt, labels=prompt).loss:.3f}")
shared = len(dropped["loudest"] & dropped["reap"])
print(f"{shared} of {len(dropped['reap'])} dropped experts are the same")
