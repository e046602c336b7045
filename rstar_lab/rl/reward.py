"""The reward: 1 exactly when the final answer is right (rStar2-Agent, section 2: nothing for format or tool use).

`verify` runs anywhere; the rest of this module only gives it its name in the language of RL.
"""

from rstar_lab.verify import extract_answer, verify, verify_many, warm_up

__all__ = ["extract_answer", "reward", "verify", "verify_many", "warm_up"]


def reward(response_text: str, answer: str) -> float:
    """1.0 or 0.0. Hand in the model's own text only, never what tools printed."""
    return float(verify(response_text, answer))
