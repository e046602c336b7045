"""The training data of `rstar-lab export`, loaded by the libraries that train on them. A library that is missing is skipped."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.chat_models import chat_tokenizer, save_chat_model

from rstar_lab.analysis import export_preferences, export_sft, open_runs

GOLDEN = Path(__file__).parent.parent / "golden" / "runs" / "tiny_fast-rl"
STEPS = {"steps": (1, 2)}
WHERE = STEPS | {"rewarded": True, "ranges": {"calls": (1, None)}}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with the data in each format, and the rows of the format sft."""
    folder, runs = tmp_path_factory.mktemp("data"), open_runs(GOLDEN)
    for suffix in ("jsonl", "parquet"):
        export_sft(runs, folder / f"messages.{suffix}", WHERE)
        export_sft(runs, folder / f"tokens.{suffix}", WHERE, tokens=True)
        export_preferences(runs, folder / f"pairs.{suffix}", STEPS)
    rows = [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]
    assert len(rows) > 20
    return SimpleNamespace(folder=folder, rows=rows)


def qwen_template(name):
    """Return a chat template of Qwen2.5 that the package trl ships."""
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def load(data, name, suffix="jsonl"):
    datasets = pytest.importorskip("datasets")
    kind = {"jsonl": "json"}.get(suffix, suffix)
    file = str(data.folder / f"{name}.{suffix}")
    return datasets.load_dataset(kind, data_files=file, split="train", cache_dir=str(data.folder / "cache"))


def written(row):
    """Return what a model with calls in JSON writes in a row, turn by turn."""
    texts = []
    for message in row["messages"]:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            lines = [json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in calls]
            texts.append(
                message["content"] + "".join(f"\n<tool_call>\n{line}\n</tool_call>" for line in lines) + "<|im_end|>"
            )
    return texts


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_datasets_loads_every_value(data, suffix):
    for loaded, row in zip(load(data, "messages", suffix), data.rows, strict=True):
        assert (
            written(loaded) == written(row) and loaded["tools"] == row["tools"] and loaded["traj_id"] == row["traj_id"]
        )
    tokens, pairs = load(data, "tokens", suffix), load(data, "pairs", suffix)
    assert len(tokens["input_ids"][0]) == len(tokens["labels"][0]) and pairs["chosen"][0][0]["role"] == "assistant"
    for row in (tokens[0], data.rows[0]):
        assert row["run_id"] == "tiny_fast-rl" and row["step"] in (1, 2) and len(row["recipe"]) == 16


def test_verl_trains_on_the_turns_of_the_model(data):
    module = pytest.importorskip("verl.utils.dataset.multiturn_sft_dataset")
    tokenizer = chat_tokenizer("qwen2.5")
    rows = module.MultiTurnSFTDataset(str(data.folder / "messages.parquet"), tokenizer, {"max_length": 8192})
    assert len(rows) == len(data.rows)
    for index in range(0, len(rows), 5):
        item = rows[index]
        trained = tokenizer.decode(item["input_ids"][item["loss_mask"].bool()])
        assert trained.replace("<|im_end|>\n", "<|im_end|>") == "".join(written(data.rows[index]))
        schema = json.dumps(data.rows[index]["tools"][0])
        assert schema in tokenizer.decode(item["input_ids"])


def test_trl_trains_on_messages_tokens_and_pairs(data, tmp_path):
    trl = pytest.importorskip("trl")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_chat_model(tmp_path / "model", "qwen2.5")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = qwen_template("qwen2_5_training")
    options = {"output_dir": str(tmp_path), "max_length": None, "report_to": [], "use_cpu": True, "bf16": False}
    options |= {"per_device_train_batch_size": 1, "max_steps": 1, "save_strategy": "no"}

    def trainer(kind, name, **more):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        model.resize_token_embeddings(1024)  # the vocabulary of the run
        rows = load(data, name).select(range(2))
        arguments = getattr(trl, f"{kind}Config")(**options, **more)
        return getattr(trl, f"{kind}Trainer")(
            model=model, args=arguments, train_dataset=rows, processing_class=tokenizer
        )

    messages = trainer("SFT", "messages", assistant_only_loss=True)
    (batch,) = [messages.data_collator([messages.train_dataset[0]])]
    trained = tokenizer.decode(batch["input_ids"][batch["labels"] != -100])
    # The template's mask has the line break behind the header of a turn.
    assert re.sub(r"<\|im_end\|>\n?", "<|im_end|>", trained).replace("\n<reason>", "<reason>") == "".join(
        written(data.rows[0])
    )
    tokens, exact = trainer("SFT", "tokens"), load(data, "tokens")[0]
    (batch,) = [tokens.data_collator([tokens.train_dataset[0]])]
    assert batch["input_ids"][0].tolist() == exact["input_ids"] and batch["labels"][0].tolist() == exact["labels"]
    pairs = trainer("DPO", "pairs")
    chosen = tokenizer.decode(pairs.train_dataset[0]["chosen_ids"])
    assert "<tool_call>" in chosen and "<tools>" in tokenizer.decode(pairs.train_dataset[0]["prompt_ids"])
    for each in (messages, tokens, pairs):
        assert each.train().training_loss > 0


def test_axolotl_trains_on_messages_and_takes_tokens_as_they_are(data):
    pytest.importorskip("axolotl")
    from axolotl.prompt_strategies.chat_template import load as load_strategy
    from axolotl.utils.dict import DictDefault

    tokenizer = copy.deepcopy(chat_tokenizer("qwen2.5"))
    tokenizer.chat_template = qwen_template("qwen2_5")
    config = DictDefault({"train_on_inputs": False, "sequence_len": 8192, "chat_template": "tokenizer_default"})
    strategy = load_strategy(tokenizer, config, {"type": "chat_template", "field_messages": "messages"})
    for loaded, row in list(zip(load(data, "messages"), data.rows, strict=True))[::5]:
        item = strategy.tokenize_prompt(loaded)
        assert tokenizer.decode([label for label in item["labels"] if label != -100]) == "".join(written(row))
        assert json.dumps(row["tools"][0]) in tokenizer.decode(item["input_ids"])
    # `_is_dataset_already_tokenized` of axolotl.utils.data.wrappers looks for these columns.
    assert {"input_ids", "attention_mask", "labels"} <= set(load(data, "tokens").column_names)


def test_llamafactory_reads_messages_without_text_before_calls(data, monkeypatch):
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    converter = pytest.importorskip("llamafactory.data.converter", exc_type=ImportError)
    from llamafactory.data.parser import DatasetAttr

    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    description = json.loads(page.split("dataset_info.json", 1)[1].split("```json\n")[1].split("```")[0])["clean"]
    attributes = DatasetAttr("file", description["file_name"])
    attributes.join(description)
    options = SimpleNamespace(streaming=False, preprocessing_num_workers=1, overwrite_cache=True, media_dir="")
    read = converter.align_dataset(load(data, "messages"), attributes, options, SimpleNamespace(local_process_index=0))
    called = [pair for pair in zip(read, data.rows, strict=True) if "tool_calls" in pair[1]["messages"][2]]
    assert len(called) > 20
    for item, row in called:
        assert [turn["role"] for turn in item["_prompt"][:2]] == ["user", "function"]
        (call, *_) = json.loads(item["_prompt"][1]["content"])
        assert call == row["messages"][2]["tool_calls"][0]["function"] and json.loads(item["_tools"]) == row["tools"]
        assert item["_response"][0]["content"] == row["messages"][-1]["content"]
