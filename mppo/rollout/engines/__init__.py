"""Rollout engines: the contract that all of them keep, and the embedded one."""
