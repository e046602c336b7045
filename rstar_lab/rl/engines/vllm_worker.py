"""The process of a vLLM engine: `python -m rstar_lab.rl.engines.vllm_worker SLOTS`, started by `engines.vllm`.

It receives messages on the socket of its slot and sends its results there. Requests of one message are added to the engine
before its next step, so with one message per turn the batches, and therefore the sampled tokens, do not depend on timing.
"""

import gc
import json
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rstar_lab.hardware.processes import release_free_heap
from rstar_lab.rl.engine import Sampling
from rstar_lab.rl.seeds import derive_seed

HEARTBEAT_S = 5.0  # a busy engine sends at least this often, so `stall_s` must be larger

# File descriptors of the socket, of the life pipe (it closes when the parent ends) and of the log; the folder for
# vLLM's temporary files.
WorkerSlot = tuple[int, int, int, str]


def attach_to_slot(slot: WorkerSlot) -> None:
    """Attach to this worker slot. Exit when the parent closes its end of the life pipe, including when it is killed."""
    _, life, _, sockets = slot
    os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = sockets

    def watch() -> None:
        os.read(life, 1)
        shutil.rmtree(sockets, ignore_errors=True)  # the parent is gone and cannot remove it
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def register_model_class(folder: Path) -> None:
    """On a CPU, register the model's class in this process. vLLM would start another process that imports vLLM again."""
    import torch
    from vllm import ModelRegistry

    from rstar_lab.untrusted.files import read_json

    if torch.cuda.is_available() or not (folder / "config.json").is_file():
        return
    for name in read_json(folder / "config.json", dict).get("architectures") or []:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def enable_cpu_norm_kernels() -> None:
    """On a CPU, run RMSNorm in vLLM's own CPU kernels.

    vLLM leaves the norms to torch.compile. Without it, each norm takes about five torch kernels, and all norms together
    an eighth of the step time of a small model.
    """
    import torch
    from torch import Tensor
    from vllm import ir

    if torch.cuda.is_available():
        return
    kernels, norm, add_norm = torch.ops._C, ir.ops.rms_norm, ir.ops.fused_add_rms_norm

    def fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        whole_vectors = x.shape[-1] % 16 == 0  # the kernels only process multiples of 16
        return whole_vectors and variance_size is None and weight is not None and weight.dtype == x.dtype

    def fits_add(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return x.is_contiguous() and fits(x, weight, epsilon, variance_size)

    @norm.register_impl("cpu", supports_args=fits)
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        x = x.contiguous()  # the kernel ignores strides
        out = torch.empty_like(x)
        kernels.rms_norm(out, x, weight, epsilon)
        return out

    @add_norm.register_impl("cpu", supports_args=fits_add, inplace=True)
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        kernels.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    for op in (norm, add_norm):
        op.set_default(["cpu", "native"])


@dataclass(slots=True)
class Request:
    """A request in flight. token_ids, log_probs, versions: the part that was generated under earlier weights."""

    prompt_ids: list[int]
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    def append(self, token_ids: list[int], log_probs: list[float], version: int) -> None:
        if token_ids:
            self.token_ids += token_ids
            self.log_probs += log_probs
            self.versions.append((version, len(token_ids)))


class Worker:
    """Runs a vLLM engine and handles the messages of the parent."""

    def __init__(self, connection: Connection, model: str, options: dict[str, Any]):
        from vllm import LLM

        register_model_class(Path(model))
        self.connection = connection
        self.llm = LLM(model=model, **options)
        enable_cpu_norm_kernels()
        self.engine = self.llm.llm_engine
        self.version = 0
        self.requests: dict[int, Request] = {}  # in flight

    def serve(self) -> None:
        """Handle messages and step the engine until the process is killed or the parent is gone."""
        heartbeat = time.monotonic()
        while True:
            idle = not self.engine.has_unfinished_requests()
            while self.connection.poll(None if idle else 0):
                self.handle(*self.connection.recv())
                idle = not self.engine.has_unfinished_requests()
            outputs = [output for output in self.engine.step() if int(output.request_id) in self.requests]
            if outputs:
                self.connection.send(("done", [self.result(output) for output in outputs]))
            if time.monotonic() - heartbeat > HEARTBEAT_S:
                heartbeat = time.monotonic()
                self.connection.send(("heartbeat",))

    def handle(self, kind: str, *arguments: Any) -> None:
        if kind == "generate":
            for request_id, prompt_ids, sampling in arguments[0]:
                self.requests[request_id] = Request(prompt_ids, sampling)
                self.submit(request_id)
        elif kind == "abort":
            self.engine.abort_request([str(request_id) for request_id in arguments[0]])
            for request_id in arguments[0]:
                self.requests.pop(request_id, None)
        elif kind == "interrupt":
            self.connection.send(("done", [self.result(output) for output in self.abort_all()]))
        elif kind == "weights":
            source, version = arguments
            # All tokens so far were generated under the old weights. A step that vLLM has scheduled ahead (on GPUs) ends
            # after the abort, and its tokens are discarded.
            for output in self.abort_all():
                self.requests[int(output.request_id)].append(*tokens_of(output), self.version)
            try:
                self.load_weights(source)
            except Exception as error:  # a failed load must not end the requests of other rollouts
                answer = ("weights_failed", f"{type(error).__name__}: {error}")
            else:
                self.version = version
                answer = ("weights", version)
            for request_id in list(self.requests):
                self.submit(request_id)
            self.connection.send(answer)

    def abort_all(self) -> list[Any]:
        """Abort all requests in the engine; return their outputs so far."""
        outputs = [self.partial_output(state) for state in self.engine.output_processor.request_states.values()]
        self.engine.abort_request([output.request_id for output in outputs])
        return outputs

    def submit(self, request_id: int) -> None:
        """Add a request to the engine, or the rest of a request after a change of weights."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        request = self.requests[request_id]
        sampling, seed, done = request.sampling, request.sampling.seed, len(request.token_ids)
        if seed is not None and done:
            seed = derive_seed(seed, "continued", done)
        prompt_ids = request.prompt_ids + request.token_ids
        params = SamplingParams(
            max_tokens=sampling.max_tokens - done,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        limit = self.engine.vllm_config.model_config.max_model_len
        if len(prompt_ids) >= limit:  # vLLM would end the process and all other requests
            text = f"the prompt has {len(prompt_ids)} tokens, but the model's maximum is {limit}"
            self.reject(request_id, text)
            return
        try:
            self.engine.add_request(str(request_id), TokensPrompt(prompt_token_ids=prompt_ids), params)
        except Exception as error:
            self.reject(request_id, f"{type(error).__name__}: {error}")

    def reject(self, request_id: int, text: str) -> None:
        del self.requests[request_id]
        self.connection.send(("refused", request_id, text))

    @staticmethod
    def partial_output(state: Any) -> Any:
        """Return the output of an unfinished request with the tokens generated so far."""
        from vllm.v1.engine import FinishReason

        return state.make_request_output(
            new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
        )

    def result(self, output: Any) -> tuple[int, list[int], list[float], str, int, tuple[tuple[int, int], ...]]:
        """Return (request, token ids, log-probs, reason, version, parts by version) of a request that ended."""
        request_id = int(output.request_id)
        request = self.requests.pop(request_id)
        request.append(*tokens_of(output), self.version)
        # vLLM's `error` is an internal error of this request: its tokens are not a completion.
        reason = {"abort": "aborted", "length": "length", "stop": "stop"}.get(output.outputs[0].finish_reason, "error")
        version = request.versions[-1][0] if request.versions else self.version
        parts = tuple(request.versions) if len(request.versions) > 1 else ()
        return request_id, request.token_ids, request.log_probs, reason, version, parts

    def load_weights(self, source: tuple[str, Any]) -> None:
        """Load weights from ("file", path) or ("tensors", pickled (tensors, aliases, adapters)). Raises RuntimeError if it fails."""
        from rstar_lab.rl.engines.weights import read_weights, resolve_aliases
        from rstar_lab.rl.models.lora import merge

        kind, payload = source
        if kind == "file":
            tensors, adapters = read_weights(payload), {}
        else:
            shared, aliases, adapters = pickle.loads(payload)
            tensors = resolve_aliases(shared, aliases)
        # vLLM takes the tensors of one layer at a time, so merged weights need the memory of one layer.
        merged = ((name, merge(tensor, adapters.get(name))) for name, tensor in tensors.items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": merged})
        self.assert_loaded(tensors)
        # Cached blocks hold keys and values of the old weights.
        if not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache, which still holds values of the old weights")
        del tensors, adapters, merged
        release_free_heap()

    def assert_loaded(self, tensors: dict[str, Any]) -> None:
        """Compare the parameters that vLLM stores unchanged (norms and embeddings) with the tensors that were sent."""

        def different(model: Any) -> list[str]:
            names = []
            for name, parameter in model.named_parameters():
                sent = tensors.get(name)
                if sent is None or not name.endswith(("norm.weight", "embed_tokens.weight")):
                    continue
                loaded = parameter.data.flatten()[: min(sent.numel(), 65_536)]
                if not (loaded == sent.flatten()[: len(loaded)].to(loaded)).all():
                    names.append(name)
            return names

        if names := self.llm.apply_model(different)[0]:
            raise RuntimeError(f"vLLM kept old weights in {len(names)} parameters, such as {names[0]}")


def tokens_of(output: Any) -> tuple[list[int], list[float]]:
    """Return the token ids and log-probs of an output of vLLM."""
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    return token_ids, [entry[token].logprob for entry, token in zip(completion.logprobs or (), token_ids, strict=True)]


def fork_workers(slots: list[WorkerSlot]) -> WorkerSlot:
    """Fork one process for each slot after the first, which this process uses. Returns the slot of the current process and
    closes the file descriptors of the others."""
    own = slots[0]
    for slot in slots[1:]:
        if os.fork() == 0:
            own = slot
            attach_to_slot(own)
            os.dup2(own[2], 1)
            os.dup2(own[2], 2)
            break
    for slot in slots:
        if slot is not own:
            for fd in slot[:3]:
                os.close(fd)
    return own


def main() -> None:
    slots: list[WorkerSlot] = [tuple(slot) for slot in json.loads(sys.argv[1])]
    attach_to_slot(slots[0])
    gc.disable()  # the import creates a million objects that are never freed
    from vllm import LLM  # noqa: F401  (takes seconds; meanwhile the parent may still be building the model)

    gc.freeze()
    gc.enable()
    connection = Connection(fork_workers(slots)[0])
    connection.send(("hello", os.getpid()))
    model, options = connection.recv()
    try:
        worker = Worker(connection, model, options)
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    cache = worker.engine.vllm_config.cache_config
    connection.send(("ready", (cache.num_gpu_blocks or 0) * cache.block_size))
    worker.serve()


if __name__ == "__main__":
    with suppress(EOFError, BrokenPipeError):
        main()
    time.sleep(60)  # the parent is gone: the thread that watches the life pipe cleans up and ends this process
