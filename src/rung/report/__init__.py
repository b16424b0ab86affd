"""What a run has to say: the metrics log, the live view, plots and the HTML report."""
