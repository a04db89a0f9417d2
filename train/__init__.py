"""Training: `python -m train` from the settings to a run folder with metrics, a plot and checkpoints."""
