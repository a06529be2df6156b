"""The loop: tasks, rollouts, rewards, the training step, the gate. Importing this package imports no torch."""
