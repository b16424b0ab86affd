"""Training: the optimizer, the schedule, the step, the loop, and checkpoints."""
