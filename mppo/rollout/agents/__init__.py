"""Agents: how a prompt becomes trajectories. Only they know turns, tools and chat templates."""
