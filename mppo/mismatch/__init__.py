"""Why trainer and engine give the same tokens different log-probs."""
