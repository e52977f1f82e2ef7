"""What one calibration pass leaves behind: sums over tokens, mergeable, saved as safetensors."""
