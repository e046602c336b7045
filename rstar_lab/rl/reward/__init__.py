"""Rewards of rollouts: answer verification, user functions, and functions in TRL's form."""

from rstar_lab.rl.reward.functions import RewardInputs, UserReward, make_reward, reward
from rstar_lab.verify import extract_answer, verify, verify_many, warm_up

__all__ = ["RewardInputs", "UserReward", "extract_answer", "make_reward", "reward", "verify", "verify_many", "warm_up"]
