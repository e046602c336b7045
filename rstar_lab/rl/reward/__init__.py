"""Rewards of rollouts: answer verification, user functions, and reward functions written for TRL."""

from rstar_lab.rl.reward.functions import RewardInputs, RolloutReward, UserReward, make_reward, reward
from rstar_lab.rl.reward.hidden_tests import HiddenTests
from rstar_lab.verify import extract_answer, verify, verify_many

__all__ = [
    "HiddenTests", "RewardInputs", "RolloutReward", "UserReward", "extract_answer", "make_reward", "reward", "verify",
    "verify_many",
]  # fmt: skip
