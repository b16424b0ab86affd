"""Whole jobs, put together from the rooms: a training run with its listeners, a run opened for use, the demo."""
