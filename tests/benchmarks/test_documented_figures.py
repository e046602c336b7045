"""The figures of docs/benchmarks.md and README.md are those in benchmarks/data, the output of `rstar-lab bench NAME --json`."""

import csv
import json
import re
from pathlib import Path

import pytest

from rstar_lab.common.resources import benchmark_file

ROOT = Path(__file__).parents[2]
# Text of the documentation with the fields of a line: {a.value} is the value of line `a`, {a.ratio} two digits of its ratio.
PAGE = {
    "sandbox": [
        "`print(1+1)`, batches of 64 | {a.value:.0f} calls/s | code-judge, two workers: {a.against:.0f} | {a.times}x |",
        "`b`: numpy | {b.value:.0f} calls/s | {b.against:.0f} | {b.times}x |",
        "`c`: sympy | {c.value:.0f} calls/s | {c.against:.1f} | {c.times}x |",
        "endless loops, 1,600 calls | {mix.value:.0f} calls/s | {mix.against:.1f} | {mix.times}x |",
        "16 clients | p99 {short_p99_over_p50.value:.1f} times p50 |",
        "512 at a time | {in_flight_512.value:.0f} calls/s, none lost, no sandbox error |",
        "HTTP included | {cpu_a.value:.1f}, {cpu_b.value:.1f}, {cpu_c.value:.0f} ms "
        "| a bare fork: {cpu_a.against:.1f}, {cpu_b.against:.1f}, {cpu_c.against:.0f} ms |",
        "on two cores | {redis_workers_1.value:.0f}, {redis_workers_2.value:.0f}, {redis_workers_3.value:.0f} calls/s |",
    ],
    "trainer": [
        "lengths of a trained model | {trainer_step.value:.1f} s | TRL 1.16.0's GRPOTrainer: {trainer_step.peer:.1f} s "
        "| {trainer_step.times}x |",
        "before the answer | {trainer_step_multi_turn.value:.1f} s | TRL 1.16.0, `tools=`: {trainer_step_multi_turn.peer:.1f} s "
        "| {trainer_step_multi_turn.times}x |",
        "82 million parameters | {trainer_update_lora.value:.1f} s, {trainer_memory_lora.value:.2f} GB | the same with all "
        "weights: {trainer_update_lora.peer:.1f} s, {trainer_memory_lora.peer:.2f} GB "
        "| {trainer_update_lora.times}x, {trainer_memory_lora.times}x |",
    ],
    "trainer-model": [
        "4 prompts x 4, at most 64 tokens, float32 | {trainer_model_step.value:.0f} s, {trainer_model_memory.value:.1f} GB | TRL 1.16.0's "
        "GRPOTrainer: {trainer_model_step.peer:.0f} s, {trainer_model_memory.peer:.1f} GB "
        "| {trainer_model_step.times}x, {trainer_model_memory.times}x |",
    ],
    "rollout-model": [
        "64 tokens, float32 | {rollout_model_vllm.value:.0f} tokens/s | vLLM's own server: {rollout_model_vllm.peer:.0f}; transformers' "
        "`generate`: {rollout_model_transformers.peer:.0f} | {rollout_model_vllm.times}x, {rollout_model_transformers.times}x |",
    ],
    "gpu": [
        "| below 0.05 | {parity_log_probs.value:.4f} |",
        "| above 0.99 | {parity_gradients.value:.4f} (ratio {parity_gradients.ratio:.4f}) |",
        "| {update_mfu_05B.value:.1f}%, {update_mfu_17B.value:.1f}%, {update_mfu_4B.value:.1f}% |",
        "| {update_tokens_05B.value:,.0f}, {update_tokens_17B.value:,.0f}, {update_tokens_4B.value:,.0f} |",
        "| {update_memory_05B.value:.1f}, {update_memory_17B.value:.1f}, {update_memory_4B.value:.1f} GB "
        "({update_memory_05B.ratio:.2f}, {update_memory_17B.ratio:.2f}, {update_memory_4B.ratio:.2f}) |",
        "| {sft_tokens.value:,.0f} |",
        "| without vLLM: {weight_sync.value:.2f} s |",
    ],
}
README = {
    "sandbox": ["| {a.times}x (`print`), {b.times}x (numpy), {c.times}x (sympy) calls per second |"],
    "trainer": ["| {trainer_step.times}x (one turn), {trainer_step_multi_turn.times}x (three turns) |"],
}


class Line:
    """One line of a benchmark: its fields, `times` (two digits of the ratio), and `peer` (the number in the text of `against`)."""

    def __init__(self, fields: dict) -> None:
        self.__dict__ |= fields
        self.times = f"{float(f'{self.ratio:.2g}'):g}" if self.ratio else None
        words = self.against.split() if isinstance(self.against, str) else []
        self.peer = float(words[-2]) if re.fullmatch(r"[\d.]+", "".join(words[-2:-1])) else None


@pytest.mark.parametrize("name", PAGE)
def test_the_documentation_has_the_recorded_figures(name):
    records = map(json.loads, benchmark_file(f"bench-{name}.jsonl").read_text().splitlines())
    lines = {fields["name"].replace(".", ""): Line(fields) for fields in records}
    for file, texts in (("docs/benchmarks.md", PAGE[name]), ("README.md", README.get(name, []))):
        page = (ROOT / file).read_text()
        assert [text for text in (text.format(**lines) for text in texts) if text not in page] == []


def test_the_documentation_has_the_metrics_of_the_demo_on_a_gpu():
    with benchmark_file("demo-gpu.csv").open() as file:
        steps = list(csv.DictReader(file))

    def span(column, form):
        values = [float(step[column]) for step in steps]
        return f"{min(values):{form}} to {max(values):{form}}"

    page = " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    for column, form in (("generate_s", ".2f"), ("update_s", ".2f"), ("weights_s", ".2f"), ("mismatch", ".5f")):
        assert span(column, form) in page, column
    assert f"(largest: {max(float(step['mismatch_max']) for step in steps):.3f})" in page
    assert {step[name] for step in steps for name in ("sandbox_failures", "engine_failures")} == {"0"}
