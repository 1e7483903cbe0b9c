"""A tokenizer as transformers reads it: `tokenizer.json` and `tokenizer_config.json` beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overnight.errors import DataError
from overnight.interop.layout import read_mapping_of_others

_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
_BERT_INPUTS = ("input_ids", "token_type_ids", "attention_mask")


def pieces_of(tokenizer: dict[str, Any], path: Path) -> list[str]:
    """Return the vocabulary in the order of its ids.

    Raises:
        DataError: it is no whole WordPiece vocabulary.
    """
    model = tokenizer.get("model", {})
    if model.get("type") != "WordPiece":
        raise DataError(f"{path}: is a {model.get('type')} tokenizer; only WordPiece, BERT's, can be used here")
    by_id = {i: piece for piece, i in model["vocab"].items()}
    if sorted(by_id) != list(range(len(model["vocab"]))):
        raise DataError(f"{path}: the ids of its vocabulary are not 0 to {len(model['vocab']) - 1}, each once")
    missing = [token for token in _SPECIAL.values() if token not in model["vocab"]]
    if missing:
        raise DataError(f"{path}: lacks the special token {missing[0]}")
    return [by_id[i] for i in range(len(by_id))]


def with_template(tokenizer: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    """Return the tokenizer, always with [CLS] A [SEP] B [SEP] around its texts and without the truncation and padding of one use."""

    def special(name: str, segment: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": segment}}

    def text(name: str, segment: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": segment}}

    single = [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, text("B", 1), special("[SEP]", 1)],
        "special_tokens": {t: {"id": t, "ids": [pieces.index(t)], "tokens": [t]} for t in ("[CLS]", "[SEP]")},
    }
    return {**tokenizer, "post_processor": template, "truncation": None, "padding": None}


def longest_text(folder: Path, positions: int) -> int:
    """Return the tokens at which the texts of a Hugging Face folder are cut: its `model_max_length`, where the network has positions for so many.

    Raises:
        DataError: `tokenizer_config.json` cannot be read.
    """
    path = folder / "tokenizer_config.json"
    longest = read_mapping_of_others(path).get("model_max_length") if path.is_file() else None
    # Two of them are [CLS] and [SEP]. What nobody has set is 10^30.
    return min(longest, positions) if type(longest) is int and longest > 2 else positions


def tokenizer_config(tokenizer: dict[str, Any], longest: int, inputs: tuple[str, ...]) -> dict[str, Any]:
    """Return `tokenizer_config.json`: BERT's own class where it does exactly this, which rebuilds the tokenizer from the vocabulary, else the class that takes the file as it is.

    Args:
        longest: tokens of a text at most.
        inputs: what the model is given; without segments it is not BERT's class.
    """
    normalizer = tokenizer.get("normalizer") or {}
    wordpiece = tokenizer["model"]
    plain = (
        inputs == _BERT_INPUTS
        and normalizer.get("type") == "BertNormalizer"
        and normalizer.get("clean_text")
        and (tokenizer.get("pre_tokenizer") or {}).get("type") == "BertPreTokenizer"
        and wordpiece.get("continuing_subword_prefix") == "##"
        and wordpiece.get("max_input_chars_per_word") == 100
        and wordpiece.get("unk_token") == "[UNK]"
    )
    config: dict[str, Any] = {**_SPECIAL, "model_max_length": longest}
    if not plain:
        return {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": list(inputs), **config}
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer["lowercase"],
        "strip_accents": normalizer["strip_accents"],
        "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        **config,
    }
