"""SGLang servers behind the contract of rollout engines."""
