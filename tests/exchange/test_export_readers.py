"""The training data of `rstar-lab export`, loaded by the libraries that train on them. A library that is missing is skipped."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.chat_models import chat_tokenizer

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
