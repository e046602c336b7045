"""A short real run whose reward is a hash of the text, so that groups of an untrained model have different rewards.

python tests/helpers/scored_run.py RUNS_DIR
"""

import asyncio
import hashlib
import sys
from pathlib import Path

from rstar_lab.common.progress import Reporter
from rstar_lab.rl import pipeline
from rstar_lab.rl.models.model import build_tiny, save_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.resolved import resolve

RECIPE = {
    "name": "scored",
    "model": "model",
    "rl": {
        "problems_per_step": 3,
        "group_size": 4,
        "limits": {"max_response_tokens": 40, "max_turns": 2},
        "lr": 1e-3,
        "warmup_steps": 2,
        "mini_batches": 2,
        "schedule": {"lockstep": True},
        "token_arrays": "all",
        "checkpoint_every": 2,
        "reward": "helpers.scored_run:score",
    },
    "stages": [
        {"name": "one", "problems": {"synthetic": {"count": 10, "levels": [1]}}, "steps": 3},
        {
            "name": "two",
            "problems": {"synthetic": {"count": 10, "levels": [2]}},
            "steps": 2,
            "limits": {"max_response_tokens": 50},
        },
    ],
    "engine": {"dtype": "float32", "count": 1, "kv_cache_gb": 0.1, "max_num_seqs": 32},
    "sandbox": {"workers": 1},
}


def score(text: str, answer: str) -> float:
    return float(hashlib.sha256(text.encode()).digest()[0] % 2)


def make_model(folder: Path) -> None:
    tokenizer = train_tokenizer(["some text"], 300)
    save_model(folder, build_tiny(tokenizer, seed=0, hidden_size=64, layers=2, heads=2, kv_heads=1), tokenizer)


async def main(runs_dir: Path) -> None:
    if not (runs_dir / "model").exists():
        make_model(runs_dir / "model")
    recipe = parse_recipe(RECIPE | {"runs": str(runs_dir), "model": str(runs_dir / "model")})
    async with pipeline.RunSession.open(resolve(recipe), Reporter()) as session:
        await pipeline.train(session, runs_dir / "model")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
