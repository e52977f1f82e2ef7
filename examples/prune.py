"""Score the experts of a model, drop the worst quarter, compare the two models on a text, and
export the smaller one.

python examples/prune.py [MODEL] [TEXT] [OUT]: a folder or hub id, a text file or hub data set, a
new folder.
"""

import sys

import torch

import moe_lab

MODEL, TEXT, OUT = (
    *sys.argv[1:],
    *("pocket:olmoe", "pocket:calibration/general.jsonl", "pruned")[len(sys.argv) - 1 :],
)

model, tokenizer = moe_lab.load(MODEL)
statistics = moe_lab.calibrate(model, tokenizer, TEXT, tokens=16_384, length=512)
scores = moe_lab.score("reap", statistics)
plan = moe_lab.plan(scores, ratio=0.25)

SOLUTION = (
    "Problem: Find term 6 of 7, 9, 11, ...\nSolution: 9-7=2. 2*5=10. 7+10=17. The answer is 17."
)
prompt = tokenizer(SOLUTION, return_tensors="pt").input_ids
with torch.no_grad():
    whole = model(prompt, labels=prompt).loss
    with moe_lab.mask(model, plan):
        pruned = model(prompt, labels=prompt).loss

print(scores.nsmallest(5, "score").to_string(index=False))
print(f"loss of the prompt: {whole:.3f} with all experts, {pruned:.3f} with three quarters of them")
print(f"written to {moe_lab.export(MODEL, plan, OUT)}")
