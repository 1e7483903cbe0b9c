"""Small models that transformers writes, with a WordPiece tokenizer: what others would hand us."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from overnight.batches.packing import Batch
from overnight.corpus.tokenizer import SPECIALS

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "good", "bad", "film", "##ing", "."]
V = len(PIECES)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 40}


def write_tokenizer(folder: Path, pieces: list[str] = PIECES, lowercase: bool = True) -> None:
    """Write the tokenizer as transformers saves it."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "given.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    transformers.BertTokenizer(str(folder / "given.txt"), do_lower_case=lowercase).save_pretrained(folder)
    (folder / "given.txt").unlink()


def write_model(folder: Path, name: str = "BertForPreTraining", **more: Any) -> Any:
    """Write a random model of a class of transformers and its tokenizer; returns the model."""
    import transformers

    torch.manual_seed(0)
    modern = name.startswith("Modern")
    config = (transformers.ModernBertConfig if modern else transformers.BertConfig)(
        **{"vocab_size": V, **SIZES, **more}, **(_IDS if modern else {})
    )
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.eval()


def in_cache(cache: Path, name: str, patch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the hub's client takes for the downloaded model of that name."""
    import huggingface_hub.constants

    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    return repository / "snapshots" / ("a" * 40)


_IDS = {
    "pad_token_id": 0,
    "cls_token_id": 2,
    "bos_token_id": 2,
    "sep_token_id": 3,
    "eos_token_id": 3,
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
}


def batch(sequences: int = 3, tokens: int = 11) -> tuple[torch.Tensor, Batch]:
    """Return ids (S, T) and the flat batch of them."""
    ids = torch.randint(5, V, (sequences, tokens), generator=torch.Generator().manual_seed(0))
    flat = Batch(
        ids_N=ids.flatten(),
        segments_N=torch.zeros(sequences * tokens, dtype=torch.long),
        positions_N=torch.arange(tokens).repeat(sequences),
        starts=torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32),
        lengths=(tokens,) * sequences,
    )
    return ids, flat
