"""The metrics of a vLLM server that the scheduler and the watchdog use, read from /metrics."""

from prometheus_client.parser import text_string_to_metric_families

from rstar_lab.rl.scheduling.scheduler import ServerReport


def parse_metrics(text: str) -> ServerReport | None:
    """Parse Prometheus text. Returns None if it does not come from vLLM."""
    sums: dict[str, float] = {}
    kv_tokens = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if sample.name == "vllm:cache_config_info":
                kv_tokens += _number(sample.labels, "num_gpu_blocks") * _number(sample.labels, "block_size")
    if "vllm:num_requests_running" not in sums:
        return None
    return ServerReport(
        running=int(sums["vllm:num_requests_running"]),
        waiting=int(sums.get("vllm:num_requests_waiting", 0)),
        kv_use=sums.get("vllm:kv_cache_usage_perc", 0.0),
        preemptions=int(sums.get("vllm:num_preemptions_total", 0)),
        prompt_tokens=int(sums.get("vllm:prompt_tokens_total", 0)),
        generated_tokens=int(sums.get("vllm:generation_tokens_total", 0)),
        kv_tokens=kv_tokens,
    )


def _number(labels: dict[str, str], name: str) -> int:
    value = labels.get(name, "")
    return int(value) if value.isdigit() else 0
