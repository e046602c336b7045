"""A vLLM engine in a process of its own: `python -m rstar_lab.rl.engines.vllm_worker SEATS`, started by `vllm_engine`.

It reads messages from the socket of its seat and answers on it. Requests that arrive in one message enter the engine together,
before it takes another step: with one message a turn the batches, and so the bits, do not depend on timing.
"""

import gc
import json
import os
import shutil
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rstar_lab.memory import release_free_heap

BEAT_S = 5.0


Seat = tuple[int, int, int, str]  # fds of the socket, the life pipe and the log; the folder for vLLM's sockets


def sit(seat: Seat) -> None:
    """Be the engine of this seat; end when the other end of its life pipe closes, however the parent ended."""
    _, life, _, sockets = seat
    os.environ["VLLM_RPC_BASE_PATH"] = sockets

    def watch() -> None:
        os.read(life, 1)
        shutil.rmtree(sockets, ignore_errors=True)  # the parent's, which cannot any more
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def know(folder: Path) -> None:
    """Without a GPU, have vLLM look at the model's class here: it would start a process that imports all of vLLM again."""
    import torch
    from vllm import ModelRegistry

    if torch.cuda.is_available() or not (folder / "config.json").is_file():
        return
    for name in json.loads((folder / "config.json").read_text()).get("architectures") or []:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def quicken() -> None:
    """Without a GPU, have the norms run in vLLM's own CPU kernels: it leaves them to a compiler, and where that is off to some
    five kernels of torch each, an eighth of a small model's step."""
    import torch
    from torch import Tensor
    from vllm import ir

    if torch.cuda.is_available():
        return
    kernels, norm, add_norm = torch.ops._C, ir.ops.rms_norm, ir.ops.fused_add_rms_norm

    def fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        whole_vectors = x.shape[-1] % 16 == 0  # the kernels have no loop for a rest
        return whole_vectors and variance_size is None and weight is not None and weight.dtype == x.dtype

    def fits_add(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return x.is_contiguous() and fits(x, weight, epsilon, variance_size)

    @norm.register_impl("cpu", supports_args=fits)
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        x = x.contiguous()  # the kernel does not look at strides
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


class Worker:
    def __init__(self, connection: Connection, model: str, options: dict[str, Any]):
        from vllm import LLM

        know(Path(model))
        self.connection = connection
        self.llm = LLM(model=model, **options)
        quicken()
        self.engine = self.llm.llm_engine
        self.version = 0

    def serve(self) -> None:
        """Handle messages and step the engine until the parent says close."""
        beat = time.monotonic()
        while True:
            idle = not self.engine.has_unfinished_requests()
            while self.connection.poll(None if idle else 0):
                message = self.connection.recv()
                if message[0] == "close":
                    return
                self.handle(*message)
                idle = not self.engine.has_unfinished_requests()
            if outputs := self.engine.step():
                self.connection.send(("done", [self.finished(output) for output in outputs]))
            if time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                self.connection.send(("beat",))

    def handle(self, kind: str, *arguments: Any) -> None:
        if kind == "generate":
            for request_id, prompt_ids, sampling in arguments[0]:
                self.submit(request_id, prompt_ids, sampling)
        elif kind == "abort":
            self.engine.abort_request([str(request_id) for request_id in arguments[0]])
        elif kind == "interrupt":
            cut = [self.so_far(state) for state in self.engine.output_processor.request_states.values()]
            self.engine.abort_request([output.request_id for output in cut])
            self.connection.send(("done", [self.finished(output) for output in cut]))
        elif kind == "weights":
            path, version = arguments
            self.load_weights(path)
            self.version = version
            self.connection.send(("weights", version))

    def submit(self, request_id: int, prompt_ids: list[int], sampling: Any) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        limit = self.engine.vllm_config.model_config.max_model_len
        if len(prompt_ids) >= limit:  # vLLM would end the process, and with it everybody else's requests
            text = f"a prompt of {len(prompt_ids)} tokens leaves no room in {limit}"
            self.connection.send(("refused", request_id, text))
            return
        try:
            self.engine.add_request(str(request_id), TokensPrompt(prompt_token_ids=prompt_ids), params)
        except Exception as error:
            self.connection.send(("refused", request_id, f"{type(error).__name__}: {error}"))

    @staticmethod
    def so_far(state: Any) -> Any:
        """The output of a request that has not ended, with the tokens that it has."""
        from vllm.v1.engine import FinishReason

        return state.make_request_output(
            new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
        )

    def finished(self, output: Any) -> tuple[int, list[int], list[float], str, int]:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        log_probs = [entry[token].logprob for entry, token in zip(completion.logprobs, token_ids, strict=True)]
        reason = {"abort": "aborted", "length": "length"}.get(completion.finish_reason, "stop")
        return int(output.request_id), token_ids, log_probs, reason, self.version

    def load_weights(self, path: str) -> None:
        from safetensors.torch import load_file

        tensors = load_file(path)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
        # Blocks cached under the old weights would be served for the new ones.
        self.llm.reset_prefix_cache()
        release_free_heap()


def divide(seats: list[Seat]) -> Seat:
    """A process for every seat, this one for the first. Returns this process's seat, having closed the others."""
    mine = seats[0]
    for seat in seats[1:]:
        if os.fork() == 0:
            mine = seat
            sit(mine)
            os.dup2(mine[2], 1)
            os.dup2(mine[2], 2)
            break
    for seat in seats:
        if seat is not mine:
            for fd in seat[:3]:
                os.close(fd)
    return mine


def main() -> None:
    seats: list[Seat] = [tuple(seat) for seat in json.loads(sys.argv[1])]
    sit(seats[0])
    gc.disable()  # an import makes a million objects and no garbage
    from vllm import LLM  # noqa: F401  (takes seconds: done while the parent may still be making the model)

    gc.freeze()
    gc.enable()
    connection = Connection(divide(seats)[0])
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
    try:
        main()
    except (EOFError, BrokenPipeError):
        time.sleep(60)  # the parent is gone: what watches its life pipe ends us, once it has swept
    except KeyboardInterrupt:
        pass
    # vLLM leaves threads behind that a normal exit would wait for.
    os._exit(0)
