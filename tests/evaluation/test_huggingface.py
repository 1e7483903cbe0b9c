"""A Hugging Face folder of any architecture is measured as transformers itself computes it, and a run as the folder exported from it."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from overnight import config
from overnight.config import BertRun, Run
from overnight.console import Line
from overnight.corpus.tokenizer import copy_tokenizer
from overnight.engine.finite import NonFiniteError
from overnight.errors import ConfigError, DataError
from overnight.evaluation import whole_words
from overnight.evaluation.huggingface import HuggingFaceMaskedLM, is_huggingface
from overnight.evaluation.masked import masked_score
from overnight.evaluation.masked_lm import RunMaskedLM
from overnight.evaluation.pseudo_likelihood import pseudo_log_likelihoods
from overnight.evaluation.texts import Text
from overnight.evaluation.whole_words import word_score
from overnight.interop.export import export_run
from tests.conftest import topics

transformers = pytest.importorskip("transformers")

CPU = ["compute.device=cpu", "compute.threads=1"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SENTENCES = ("A class defines its methods.", "Objects, which have attributes, are never explicitly destroyed!", "the", "is is is in")
TEXT = Text("topics", [" ".join(text.split())[:700] for text in list(topics().values())[:6]])


def write_folder(kind: str, folder: Path, data: Path) -> Path:
    """Write a small random model of an architecture, with its tokenizer."""
    torch.manual_seed(0)
    roberta = kind == "roberta"
    ids = {"pad_token_id": 1 if roberta else 0}
    if roberta:
        alphabet = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        made = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        special = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", "pad_token": "<pad>", "unk_token": "<unk>"}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=10**30, **special)
    else:
        copy_tokenizer(data, folder)
        tokenizer = transformers.BertTokenizer.from_pretrained(folder)
    sizes = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 98, **ids}
    if kind == "distilbert":
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 98, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
    if kind == "modernbert":
        sizes |= {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    settings = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForMaskedLM.from_config(settings)
    for parameter in model.parameters():  # else all tokens are about as likely
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("bert", tmp_path_factory.mktemp("hf") / "bert", tiny_data)


def opened(folder: Path, *overrides: str) -> HuggingFaceMaskedLM:
    return HuggingFaceMaskedLM(folder, config.machine_run([*CPU, *overrides]))


def naive(folder: Path, ids: list[int], masked: list[int], shown: list[int]) -> list[float]:
    """Return ln p of `ids` at some places where `shown` is read, one sequence at a time, as the example of transformers has it."""
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([shown]), attention_mask=torch.ones(1, len(shown), dtype=torch.int64)).logits[0]
    return [float(torch.log_softmax(logits[at].double(), -1)[ids[at]]) for at in masked]


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "distilbert", "electra", "albert"])
def test_pseudo_likelihoods_are_those_of_transformers_sentence_by_sentence(kind: str, tiny_data: Path, tmp_path: Path) -> None:
    folder = write_folder(kind, tmp_path / kind, tiny_data)
    model, tokenizer = opened(folder), transformers.AutoTokenizer.from_pretrained(folder)
    inner = [np.array(model.tokenizer.encode(text, add_special_tokens=False).ids) for text in SENTENCES]
    wanted = []
    for text, own in zip(SENTENCES, inner, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert ids[1:-1] == own.tolist()
        copies = [[tokenizer.mask_token_id if i == at else token for i, token in enumerate(ids)] for at in range(len(ids))]
        wanted.append(sum(naive(folder, ids, [at], copies[at])[0] for at in range(1, len(ids) - 1)))
    assert pseudo_log_likelihoods(model, inner) == pytest.approx(wanted, rel=1e-5)
    assert np.ptp(wanted) > 10  # a model that has an opinion
    assert model.longest == (96 if kind == "roberta" else 98)  # RoBERTa counts positions from 2


@pytest.mark.parametrize("kind", ["bert", "convbert", "fnet", "ibert"])
def test_bits_per_character_are_those_of_transformers_with_the_same_masks(kind: str, tiny_data: Path, tmp_path: Path) -> None:
    folder = write_folder(kind, tmp_path / kind, tiny_data)

    class Recorded(HuggingFaceMaskedLM):
        def log_probabilities(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            batches.append(batch)
            return super().log_probabilities(batch)

    batches: list[Any] = []
    found = masked_score(Recorded(folder, config.machine_run(CPU)), TEXT, Line(io.StringIO()))
    log_p: list[float] = []
    for batch in batches:
        for a, b in zip(batch.starts.tolist(), batch.starts.tolist()[1:], strict=False):
            here = (batch.predicted_M >= a) & (batch.predicted_M < b)
            shown, places = batch.ids_N[a:b].tolist(), (batch.predicted_M[here] - a).tolist()
            ids = dict(zip(places, batch.targets["mlm"][here].tolist(), strict=True))
            log_p += naive(folder, [ids.get(i, token) for i, token in enumerate(shown)], places, shown)
    assert found.masked_tokens == len(log_p)
    assert found.mlm_loss == pytest.approx(-np.mean(log_p), rel=1e-5)
    assert found.bits_per_character == pytest.approx(-sum(log_p) / found.masked_characters / math.log(2), rel=1e-5)


def test_bits_of_whole_words_are_those_of_transformers_word_by_word(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_words, "RATE", 1.0)
    text = Text("short", [passage for sentence in SENTENCES[:2] for passage in (sentence, *["left out"] * 3)])
    found = word_score(opened(bert), text, Line(io.StringIO()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    sizes, nats = list[int](), 0.0
    for passage in text.passages[::4]:
        encoded = tokenizer(passage)
        ids, numbers = encoded["input_ids"], encoded.word_ids()
        words = [[at for at, number in enumerate(numbers) if number == word] for word in range(max(filter(None, numbers)) + 1)]
        sizes += map(len, words)
        for told in range(max(map(len, words))):
            seen = {0, len(ids) - 1, *(at for word in words if len(word) > told for at in word[:told])}
            shown = [token if at in seen else tokenizer.mask_token_id for at, token in enumerate(ids)]
            nats -= sum(naive(bert, ids, [word[told] for word in words if len(word) > told], shown))
    nats -= sum(math.log(sizes.count(size) / len(sizes)) for size in sizes)
    assert found is not None and found.hidden_words == len(sizes) and max(sizes) > 2
    assert found.word_bits_per_character == pytest.approx(nats / math.log(2) / sum(map(len, text.passages[::4])), rel=1e-5)


@pytest.mark.parametrize("cased", [True, False])
def test_a_vocabulary_alone_is_read_in_lower_case_only_where_it_has_no_capitals(cased: bool, bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "bert"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    pieces = json.loads((bert / "tokenizer.json").read_text())["model"]["vocab"]
    words = list(pieces)
    words[words.index("class")] = "Class" if cased else "class"
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    ids = opened(folder).tokenizer.encode("Class", add_special_tokens=False).ids
    assert [words[i] for i in ids] == ["Class" if cased else "class"]
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert "Class" not in [words[i] for i in opened(folder).tokenizer.encode("Class", add_special_tokens=False).ids]


def test_a_run_and_the_folder_exported_from_it_have_the_same_scores(pretrained: Run, tmp_path: Path) -> None:
    assert isinstance(pretrained, BertRun)
    export_run(pretrained, tmp_path / "hf")
    for precision, close in (("fp32", 1e-5), ("bf16", 3e-3)):
        ours = RunMaskedLM(config.stored_run(pretrained.run_dir, [f"precision={precision}"]))  # type: ignore[arg-type]
        theirs = opened(tmp_path / "hf", f"precision={precision}")
        assert (ours.longest, ours.vocabulary.size) == (theirs.longest, theirs.vocabulary.size)
        one, two = (masked_score(model, TEXT, Line(io.StringIO())) for model in (ours, theirs))
        assert one.bits_per_character == pytest.approx(two.bits_per_character, rel=close)
        assert (one.masked_tokens, one.masked_characters, one.tokens) == (two.masked_tokens, two.masked_characters, two.tokens)
        inner = [np.array(ours.tokenizer.encode(text, add_special_tokens=False).ids) for text in SENTENCES]
        assert pseudo_log_likelihoods(ours, inner) == pytest.approx(pseudo_log_likelihoods(theirs, inner), rel=close)


def test_a_model_that_computes_no_numbers_has_no_score(bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "nan"))
    model = transformers.AutoModelForMaskedLM.from_pretrained(bert)
    torch.nn.init.constant_(model.bert.embeddings.word_embeddings.weight, math.nan)
    model.save_pretrained(folder)
    for measure in (
        lambda: masked_score(opened(folder), TEXT, Line(io.StringIO())),
        lambda: pseudo_log_likelihoods(opened(folder), [np.array([7, 8, 9])]),
    ):
        with pytest.raises(NonFiniteError, match="computes numbers that are not finite"):
            measure()


def test_special_tokens_in_a_text_are_words(bert: Path) -> None:
    model = opened(bert)
    assert not {model.vocabulary.mask, model.vocabulary.sep} & set(model.tokenizer.encode("a [MASK] [SEP]", add_special_tokens=False).ids)


def test_a_network_without_a_state_of_each_token_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "perceiver"))
    sizes = {
        "num_latents": 4,
        "d_latents": 16,
        "d_model": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
        "max_position_embeddings": 98,
    }
    heads = {"num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    transformers.PerceiverForMaskedLM(transformers.PerceiverConfig(**sizes, **heads)).save_pretrained(folder)
    with pytest.raises(DataError, match="model_type = 'perceiver': does not compute a hidden state of each token"):
        opened(folder)


def test_what_cannot_be_read_is_said(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_huggingface(bert) and not is_huggingface(tmp_path)

    def broken(name: str) -> Path:
        return Path(shutil.copytree(bert, tmp_path / name))

    pickled = broken("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"a model.safetensors is needed, and there is only pytorch_model.bin, a pickle"):
        opened(pickled)
    cut = broken("cut")
    (cut / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot load it as a masked language model"):
        opened(cut)
    headless = broken("headless")
    transformers.BertModel.from_pretrained(bert).save_pretrained(headless)
    with pytest.raises(DataError, match=r"its weights lack cls.predictions.* it is not a masked language model"):
        opened(headless)
    causal = broken("causal")
    (causal / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(DataError, match="cannot load it as a masked language model"):
        opened(causal)
    bare = broken("bare")
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"):
        (bare / name).unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"bare: has no tokenizer \(tokenizer.json, vocab.txt, "):
        opened(bare)
    slow = broken("slow")
    (slow / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic"}
    (slow / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        DataError, match=r'no tokenizer.json, and the BertJapaneseTokenizer .* name \{"tokenizer_class": "BertTokenizer"\} in'
    ):
        opened(slow)
    (slow / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    opened(slow)
    with pytest.raises(ConfigError, match="precision = fp8: a model of transformers is not computed in 8 bits"):
        opened(bert, "precision=fp8")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs the extra `transformers`: pip install 'overnight\[transformers\]'"):
        opened(bert)
