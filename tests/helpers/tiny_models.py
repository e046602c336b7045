"""Tiny random models and prompts, for tests of the engines."""

from pathlib import Path

from rstar_lab.rl.models.tokenizer import train_tokenizer


def make_model(folder: Path, *, seed: int = 0, tied: bool = False, max_length: int = 1024):
    from rstar_lab.rl.models.model import build_tiny, save_model

    tokenizer = train_tokenizer(["some text"], 300)
    sizes = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 128}
    model = build_tiny(tokenizer, seed=seed, max_length=max_length, **sizes)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    save_model(folder, model, tokenizer)
    return model


def prompts(count: int = 24) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (20 + i,), generator=generator).tolist() for i in range(count)]


def worst_gap(model, prompt: list[int], completion, temperature: float) -> float:
    import torch

    ids = torch.tensor([prompt + completion.token_ids])
    with torch.no_grad():
        log_probs = (model(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    own = log_probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return float((own - torch.tensor(completion.log_probs)).abs().max())
