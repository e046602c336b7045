"""Updates of RL run without dropout and router noise: with a learning rate of 0, the policy equals itself."""

from dataclasses import replace

import pytest
import torch
import transformers
from helpers.architectures import ARCHITECTURES, VOCABULARY, tiny_architecture
from helpers.trajectories import BATCH
from torch import nn

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.models.config_facts import context_length, query_width
from rstar_lab.rl.models.update_mode import without_noise
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.step import engine_mismatch
from rstar_lab.rl.training.driver import LocalPasses
from rstar_lab.rl.training.log_probs import SHARED_WIDTH, worthwhile_width
from rstar_lab.rl.training.update import Learner

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DROPS = dict.fromkeys(("attention_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"), 0.3)
# Architectures whose default config, or whose checkpoints, have dropout or router noise.
NOISY = {
    "SeedOss": SMALL | DROPS,
    "GPT2": GPT2,
    "GPTBigCode": GPT2,
    "OPT": SMALL | {"ffn_dim": 64, "dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.5, "word_embed_proj_dim": 32},
    "BioGpt": SMALL,
    "GPTNeoX": SMALL | DROPS,
    "Granite": SMALL | DROPS,
    "Phi": SMALL | DROPS,
    "Starcoder2": SMALL | DROPS,
    "Phimoe": SMALL | DROPS | {"num_local_experts": 4, "router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
}  # fmt: skip


def noisy(name):
    torch.manual_seed(0)
    config = getattr(transformers, {"OPT": "OPTConfig", "BioGpt": "BioGptConfig"}.get(name, f"{name}Config"))(
        **NOISY[name]
    )
    classes = {"GPT2": "GPT2LMHeadModel"}
    return getattr(transformers, classes.get(name, f"{name}ForCausalLM"))._from_config(config, dtype=torch.float32)


def rollouts_of(model):
    """Return rollouts whose log-probs are those of the model, which an engine computes without noise."""
    model.eval()
    found = []
    for t in BATCH:
        ids = torch.tensor([t.prompt_ids + t.response_ids])
        with torch.no_grad():
            log_probs = model(ids).logits[0, len(t.prompt_ids) - 1 : -1].float().log_softmax(-1)
        own = log_probs.gather(1, torch.tensor(t.response_ids)[:, None])[:, 0]
        found.append(replace(t, log_probs=own.tolist()))
    return found


def updated(model, **keys):
    config = model.config.to_dict()
    rollouts = rollouts_of(model)
    model.train()
    rl = RlSection(lr=0.0, weight_decay=0.0, mini_batches=2, precision="fp32", **keys)
    learner = Learner(model)
    learner.begin_stage(rl, reset=False, reference=None)
    selection = Selection.of(rollouts, [1.0 if i % 2 else -1.0 for i in range(len(rollouts))])
    update = learner.update(selection, rl, lr_scale=1.0, seed=0)
    assert model.config.to_dict() == config, "what is saved is unchanged"
    return update, engine_mismatch(selection, update.log_probs)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *NOISY])
def test_a_learning_rate_of_0_changes_nothing(name):
    model = tiny_architecture(name) if name in ARCHITECTURES and name not in NOISY else noisy(name)
    update, mismatch = updated(model)
    assert (
        update.ratio_max == pytest.approx(1, abs=1e-4) and update.statistics["clip_share"] == 0 and update.grad_norm > 0
    )
    assert abs(update.statistics["kl"]) < 1e-5 and abs(update.statistics["kl_k3"]) < 1e-6
    assert mismatch.largest < 1e-4, "the engine samples without noise"


@pytest.mark.parametrize("name", ["SeedOss", "OPT", "GPT2", "Phimoe", "Llama"])
def test_checkpointing_of_activations_works_without_noise(name):
    model = noisy(name) if name in NOISY else tiny_architecture(name)
    calls = []

    def counted(function, *arguments, **options):
        calls.append(function)
        return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)

    rl = RlSection(lr=0.0, precision="fp32", gradient_checkpointing=True)
    learner = Learner(model)
    learner.begin_stage(rl, reset=False, reference=None)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = counted
    rollouts = rollouts_of(noisy(name) if name in NOISY else tiny_architecture(name))
    update = learner.update(Selection.of(rollouts, [1.0] * len(rollouts)), rl, lr_scale=1.0, seed=0)
    assert calls, "the layers are checkpointed"
    assert engine_mismatch(Selection.of(rollouts, [1.0] * len(rollouts)), update.log_probs).largest < 1e-4


def test_noise_stays_in_the_config_and_dropout_modules_are_off():
    model = noisy("GPT2")
    without_noise(model)
    assert not any(part.training for part in model.modules() if isinstance(part, nn.Dropout))
    assert model.config.resid_pdrop == 0.1


# Configs that nest the text part, and models without attention heads


def gemma3():
    layers = ["sliding_attention", "full_attention"]
    text = SMALL | {"sliding_window": 8, "layer_types": layers, "query_pre_attn_scalar": 8}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    vision = sizes | {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=258
    )
    return transformers.Gemma3ForConditionalGeneration._from_config(config, dtype=torch.float32)


def gemma4():
    text = SMALL | {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY,
                    "num_kv_shared_layers": 0, "sliding_window": 8}  # fmt: skip
    config = transformers.Gemma4TextConfig(**text | {"layer_types": ["sliding_attention", "full_attention"]})
    return transformers.Gemma4ForCausalLM._from_config(config, dtype=torch.float32)


def falcon_mamba():
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0}
    return transformers.FalconMambaForCausalLM._from_config(
        transformers.FalconMambaConfig(**shape), dtype=torch.float32
    )


@pytest.mark.parametrize("make", ["gemma3", "gemma4", "falcon_mamba"])
def test_models_with_configs_of_another_shape_are_trained(make):
    torch.manual_seed(0)
    model = globals()[make]()
    update, mismatch = updated(model)
    assert update.ratio_max == pytest.approx(1, abs=1e-4) and mismatch.largest < 1e-4
    passes = LocalPasses(Learner(model), RlSection(), None, None)
    assert passes.max_tokens == (2**20 if make == "falcon_mamba" else 512)
    assert worthwhile_width(model) >= SHARED_WIDTH


def test_sparse_attention_that_selects_tokens_is_refused_by_name():
    # DeepSeek-V3.2, GLM-MoE-DSA, HY-V4: which tokens are selected depends on the tokens behind a position.
    model = gemma3()
    model.config.get_text_config().index_topk = 4
    with pytest.raises(UserError, match=r"Gemma3ForConditionalGeneration cannot be trained: .*\(index_topk\)"):
        updated(model)


def test_facts_of_configs_and_of_files():
    assert context_length({"text_config": {"max_position_embeddings": 7}}) == 7 == context_length({"n_positions": 7})
    assert context_length({"model_type": "mamba"}) is None
    assert (
        query_width({"num_attention_heads": 4, "hidden_size": 32})
        == 32
        == query_width({"num_attention_heads": 4, "head_dim": 8})
    )
    assert query_width({"hidden_size": 32}) is None
