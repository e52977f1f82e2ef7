"""Recovery of a pruned model before it is evaluated: fine-tuning on an instruction set, then 4-bit weights."""
