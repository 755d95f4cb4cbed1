"""The agent of one turn: the model continues the prompt, and that is the answer."""

from mppo.batch.trajectory import Trajectory
from mppo.rollout.agents.session import Session
from mppo.rollout.prompts import Prompt


async def single_turn(prompt: Prompt, session: Session) -> list[Trajectory]:
    """One trajectory, whose only turn is what the engine wrote."""
    completion = await session.complete(prompt.token_ids)
    return [session.trajectory(prompt.token_ids, completion)]
