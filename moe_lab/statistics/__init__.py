"""Statistics of a calibration pass: sums over tokens, mergeable, saved as safetensors."""
