"""The mode of a model in RL: with gradients, without dropout and router noise.

The importance ratio compares the policy before and after an update. If both passes drop different units, the ratio, the clip and
the KL measure the dropout. SFT keeps the noise of the model's config.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

NOISE = ("drop", "jitter")  # parts of the names of noise in transformers' modules


def without_noise(model: nn.Module) -> None:
    """Switch off dropout and router noise. Gradients and gradient checkpointing stay; the config of the model is not changed."""
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # transformers checkpoints activations only in this mode
            for name, value in vars(module).items():
                if isinstance(value, float) and any(part in name for part in NOISE):
                    setattr(module, name, 0.0)


@contextmanager
def noise_off(model: nn.Module) -> Iterator[None]:
    """Switch off noise within the context."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
