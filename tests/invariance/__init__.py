"""The same gradient, loss and metrics under every layout: `python -m tests.invariance --help`."""
