"""Trajectories with random tokens, for tests of the update."""

import torch

from rstar_lab.rl.trajectory import StopReason, Trajectory


def trajectory(i: int, prompt: int, response: int) -> Trajectory:
    generator = torch.Generator().manual_seed(i)
    draw = lambda n: torch.randint(0, 259, (n,), generator=generator).tolist()  # noqa: E731
    mask = [k % 5 != 3 for k in range(response)]
    return Trajectory(
        traj_id=f"t{i}", problem_id="p", group_id="g", sample=i, question="q", truth="1", prompt_ids=draw(prompt),
        response_ids=draw(response), loss_mask=mask, log_probs=[0.0] * response, turns=(), calls=(),
        stop_reason=StopReason.ANSWERED, text="", answer=None, reward=float(i % 2), p_err=0.5, p_format=1.0, engine="",
        policy_version=0,
    )  # fmt: skip


BATCH = [trajectory(i, 3 + 2 * i, 4 + (7 * i) % 11) for i in range(6)]
