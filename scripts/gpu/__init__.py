"""What scripts/gpu-test consists of."""
