"""An engine and a reward for the tests of mode async under verl. Ray's workers import them, so this folder is on their path."""

import asyncio
import math
import random

from rstar_lab.rl.engine import Completion, FinishReason
from rstar_lab.rl.models.model import load_tokenizer

TOKEN_S = 0.02
END = 0.005  # probability that a token is the last one


class SlowEngine:
    """Samples tokens uniformly, one every TOKEN_S seconds. `interrupt` ends all requests with what they have."""

    kv_tokens = 2**20

    def __init__(self, model):
        self.vocabulary = len(load_tokenizer(model))
        self.interrupted = asyncio.Event()

    async def start(self): ...

    async def load_weights(self, path, version):
        self.interrupted.clear()

    async def generate(self, prompt_ids, sampling):
        rng, tokens = random.Random(sampling.seed), []
        while len(tokens) < sampling.max_tokens and not self.interrupted.is_set():
            await asyncio.sleep(TOKEN_S)
            if rng.random() < END:
                tokens.append(sampling.stop_token_ids[0])
                break
            tokens.append(rng.randrange(50, self.vocabulary - 50))
        ended = bool(tokens) and tokens[-1] in sampling.stop_token_ids
        unfinished = FinishReason.LENGTH if len(tokens) == sampling.max_tokens else FinishReason.ABORTED
        log_probs = [-math.log(self.vocabulary)] * len(tokens)  # close to those of an untrained model
        return Completion(tokens, log_probs, FinishReason.STOP if ended else unfinished)

    def interrupt(self):
        self.interrupted.set()


def serve(model, options):
    return SlowEngine(model)


def reward(text, answer):
    """Return 0 or 1 at random, so that groups have a signal."""
    return float(len(text) % 2)
