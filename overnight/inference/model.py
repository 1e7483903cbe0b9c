"""`overnight.load`: a trained model as one object that predicts, embeds and fills in [MASK].

model = overnight.load("runs/mine")
model.embed(["one text", "another"])  # float32 (2, width)
model.fill("The capital of [MASK] is Paris.")
overnight.load("runs/mine", task="sst2").predict(["a good film"])
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from overnight.checkpoint import reader
from overnight.checkpoint.initial import Initial
from overnight.checkpoint.task_folder import folders_of_tasks
from overnight.config import BertRun, is_huggingface, machine_run, meant, refuse_untrained, stored_run, task_folder
from overnight.corpus.tokenizer import build_tokenizer, vocabulary
from overnight.engine.precision import DTYPES, slow_precision, to_answer
from overnight.engine.training_run import set_up_machine
from overnight.engine.workload import blank_model
from overnight.errors import ConfigError, DataError
from overnight.finetune.predict import DOC_STRIDE, MAX_ANSWER, Trained, answer_rows, at_work, load_trained, read_row
from overnight.finetune.workload import task_model
from overnight.inference.embedding import Vectors, check_embedding, embed_texts
from overnight.interop.export_marks import task_of
from overnight.interop.huggingface import head_of, load_pretrained, task_settings
from overnight.interop.sources import HUB, hub_folder, read_source
from overnight.interop.tokenizer_files import longest_text
from overnight.models.building import to_be_filled
from overnight.state_files import is_text, kind_of
from overnight.tasks.classification import kind_of_glue

Text = str | Sequence[str] | Mapping[str, Any]
"""What is answered: a text, a pair of texts, or the fields of a JSON line (`question` and `context`, `tokens`, `id` and the like)."""
Item = TypeVar("Item")
# Texts of a stream that are held at once: sorted by length among themselves, answered in the order they came.
WINDOW = 512


def load(
    path: str | os.PathLike[str], task: str = "", *, precision: str | None = None, device: str | None = None, threads: int | None = None
) -> Model:
    """Load a trained encoder.

    Args:
        path: a run folder, a fine-tuned task in it (`RUN/finetune/TASK`), a folder of Hugging Face, with the head of a task or
            without, or another checkpoint that `--from` of the command line takes.
        task: a fine-tuned task of a run folder; empty is the pretrained model.
        precision: `fp32`, `bf16` and the like; by default, and by `auto`, that of the run (fp32 where this device emulates that), or fp32.
        device: `cpu`, `cuda`; by default that of the run, or the GPU where there is one.
        threads: of the CPU; by default as of the run, or torch's own.

    Raises:
        ConfigError: a setting is wrong, or it is a byte model.
        DataError: there is nothing of the kind, or it is damaged.
    """
    given = {"precision": precision, "compute.device": device, "compute.threads": threads}
    model = open_model(os.fspath(path), task, [f"{key}={value}" for key, value in given.items() if value is not None])
    if precision not in (None, "auto") and (slow := slow_precision(precision, model.trained.device)):
        warnings.warn(slow, stacklevel=2)
    return model


def open_model(source: str, task: str, overrides: Sequence[str], reads: str = "") -> Model:
    """Load a trained encoder as :func:`load` does, with run-level overrides as the command line has them.

    Args:
        source, task: `path` and `task` of :func:`load`.
        overrides: `key=value`.
        reads: the task of GLUE whose files a folder of others, which does not say, is scored on.
    """
    path, whole = Path(source), task_folder(Path(os.path.abspath(source)))
    if (whole / "task.json").is_file() and whole.parent.name == "finetune" and not task:
        path, task = whole.parent.parent, whole.name
    if (path / "run.yaml").is_file():
        run = stored_run(path, overrides)
        if not isinstance(run, BertRun):
            raise ConfigError(f"{path}: model.kind = {run.model.kind!r}: is of bytes; name a run of BERT or ModernBERT")
        run = to_answer(run, overrides)
        # An encoder of others may lack the heads of pretraining.
        if task or not (path / "imported.json").is_file():
            return Model(load_trained(run, task or "mask"), source, task, _tasks(path))
        return Model(_pretrained(read_source(str(path)), run), source, "", _tasks(path))
    refuse_untrained(path)
    if task:
        raise ConfigError(f"task = {task!r}: {source} is not a run folder, and only run folders have fine-tuned tasks")
    if source.startswith(HUB):
        path = hub_folder(source)
    elif not path.exists() and not path.with_name(f"{path.name}.index").exists():
        raise ConfigError(f"{source}: does not exist{meant(source) or '; name a run folder, or a folder of Hugging Face'}")
    if (path / "config.json").is_file() and not is_huggingface(path):
        raise ConfigError(f"{source}: is an exported byte model; name a run of BERT or ModernBERT")
    initial = read_source(str(path))
    machine = machine_run(overrides)
    assert isinstance(machine, BertRun)
    run = dataclasses.replace(machine, model=initial.model)
    kind, labels = head_of(path, initial.headed)
    if not kind:
        trained = _pretrained(initial, run)
        return Model(dataclasses.replace(trained, longest=longest_text(path, trained.longest)), source, "", ())
    name = task_of(path / "model.safetensors") or _name(source)
    return Model(_with_head(initial, run, path, kind, labels, reads), source, name, ())


def _name(source: str) -> str:
    """Return what the task of a folder of others is called: the folder, or on its hub the end of its name."""
    return Path(source.partition("@")[0]).name if source.startswith(HUB) else Path(source).resolve().name


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained encoder with its vocabulary, and its task where it has one; not for several threads at once, which may each have a copy."""

    trained: Trained
    """The network itself, its tokenizer, device and precision."""
    source: str
    """What it was loaded from."""
    task: str
    """The fine-tuned task; empty for a pretrained model."""
    tasks: tuple[str, ...]
    """The fine-tuned tasks that its run folder has."""

    @property
    def kind(self) -> str:
        """What it predicts: classification, multi_label, regression, token_classification, spans, or mask."""
        return str(self.trained.facts["kind"])

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes of its task, if it has any."""
        return tuple(self.trained.facts.get("labels", ()))

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding."""
        return int(self.trained.network.encoder.word.weight.shape[1])

    @overload
    def predict(self, texts: Sequence[Text]) -> list[dict[str, Any]]: ...
    @overload
    def predict(self, texts: Iterator[Text]) -> Iterator[dict[str, Any]]: ...
    def predict(self, texts: Sequence[Text] | Iterator[Text]) -> list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """Answer texts, in order, with the head of the task.

        Args:
            texts: a list, or an iterator, even one without end: its answers come as an iterator, with some hundred texts held at once.

        Returns:
            of each `label` and `probabilities` (of several classes a row `labels`), the `score` of a regression, `tokens` and `tags`, or
            `answer` with its `probability` and where it stands in the context (characters from `start` to before `end`); also `id` where it was given one. A text without a token, which has no class and no score, has `error`.

        Raises:
            ConfigError: it has no head of a task.
            DataError: naming a text (line, from 1) that cannot be used.
        """
        self._check_head()
        _refuse_one(texts)
        if not isinstance(texts, Iterator):
            return [answer for first, part in _numbered(texts) for answer in self._answers(part, first)]
        return (answer for first, part in _numbered(texts) for answer in self._answers(part, first))

    def _check_head(self) -> None:
        if self.kind == "mask":
            have = (
                f"; its run has {', '.join(self.tasks)}: name {Path(self.source) / 'finetune' / self.tasks[0]} instead"
                if self.tasks
                else ""
            )
            raise ConfigError(
                f"{self.source}: is pretrained, and has no head of a task to predict with{have}; it can embed, and fill in [MASK]"
            )

    @overload
    def embed(self, texts: Sequence[str], pooling: str = "mean", layer: int = -1, normalize: bool = False) -> Vectors: ...
    @overload
    def embed(self, texts: Iterator[str], pooling: str = "mean", layer: int = -1, normalize: bool = False) -> Iterator[Vectors]: ...
    def embed(
        self, texts: Sequence[str] | Iterator[str], pooling: str = "mean", layer: int = -1, normalize: bool = False
    ) -> Vectors | Iterator[Vectors]:
        """Return one vector a text, in order: hidden states of the encoder.

        Args:
            texts: a list, or an iterator, even one without end: its vectors come as an iterator, with some hundred texts held at once. What
                is longer than the encoder reads is cut; an empty text has a vector too.
            pooling: `mean` of all tokens, [CLS] and [SEP] among them, or `first`, that of [CLS].
            layer: behind which layer: -1 the last, with the last norm, -2 the one before it; 0 is the embedding table.
            normalize: divide each vector by its length, so that products are cosines.

        Returns:
            float32 (n, width); of an iterator one (width) after another.

        Raises:
            ConfigError: naming a setting that is wrong.
            DataError: naming a text that is none.
        """
        _refuse_one(texts)
        check_embedding(self.trained, pooling, layer)
        if not isinstance(texts, Iterator):
            parts = [embed_texts(self.trained, part, pooling, layer, normalize, first) for first, part in _numbered(texts)]
            return cast(Vectors, _joined(parts, self.embedding_size))
        return (row for first, part in _numbered(texts) for row in embed_texts(self.trained, part, pooling, layer, normalize, first))

    @property
    def fills(self) -> bool:
        """Whether it can :meth:`fill` in words: it is pretrained, and has its masked-LM head."""
        return self.kind == "mask" and not self.trained.facts.get("lacks")

    def fill(self, text: str) -> list[list[dict[str, Any]]]:
        """Guess the words of a text that are written [MASK].

        Returns:
            of each [MASK] the likeliest pieces, best first: `token` and `probability`.

        Raises:
            ConfigError: it is the model of a task, or has no masked-LM head.
            DataError: it is no text, or there is no [MASK] in it, or one behind what the encoder reads.
        """
        return self.fill_all([text])[0]

    def fill_all(self, texts: Sequence[str]) -> list[list[list[dict[str, Any]]]]:
        """Return what :meth:`fill` does of each of many texts, in order; errors name the text (line, from 1)."""
        rows = self.check_fill(texts)
        return [cast(list[list[dict[str, Any]]], answer["masks"]) for answer in answer_rows(self.trained, rows)]

    def check_fill(self, texts: Sequence[str]) -> list[Any]:
        """Check that words of texts can be filled in; returns the texts as they are read.

        Raises:
            ConfigError, DataError: as of :meth:`fill`.
        """
        if not self.fills:
            why = f"is of the task {self.task!r}" if self.kind != "mask" else "has no masked-LM head"
            raise ConfigError(f"{self.source}: {why}, so it cannot fill in [MASK]; load a pretrained model")
        _refuse_one(texts)
        return [read_row(self.trained, number, _fields(number, text)) for number, text in enumerate(texts, 1)]

    def check(self, texts: Sequence[Text]) -> None:
        """Check that texts can be answered by :meth:`predict`.

        Raises:
            ConfigError, DataError: as of it.
        """
        self._check_head()
        for number, text in enumerate(texts, 1):
            read_row(self.trained, number, _fields(number, text))

    def _answers(self, texts: Sequence[Text], first: int) -> Iterator[dict[str, Any]]:
        rows = [read_row(self.trained, number, _fields(number, text)) for number, text in enumerate(texts, first)]
        for text, answer in zip(texts, answer_rows(self.trained, rows), strict=True):
            named = isinstance(text, Mapping) and text.get("id") is not None
            yield {key: value for key, value in answer.items() if key != "id" or named}


def _fields(number: int, text: Text) -> dict[str, Any]:
    """Return a text as the fields of a JSON line.

    Raises:
        DataError: naming the line, when it is none.
    """
    if isinstance(text, str):
        fields: dict[str, Any] = {"text": text}
    elif isinstance(text, Mapping):
        fields = dict(text)
    elif isinstance(text, list | tuple) and len(text) == 2:
        fields = {"text_a": text[0], "text_b": text[1]}
    else:
        raise DataError(f"line {number}: is {kind_of(text)}; it needs a text, a pair of texts, or an object with their names")
    for value in fields.values():
        if not all(is_text(part) for part in (value if isinstance(value, list | tuple) else [value]) if isinstance(part, str)):
            raise DataError(f"line {number}: is not valid text: half of a surrogate pair is not a character")
    return fields


def _refuse_one(texts: Any) -> None:
    if isinstance(texts, str | Mapping) or not isinstance(texts, Iterable):
        raise ConfigError(f"texts: is {kind_of(texts)}; give a list of texts, or an iterator")


def _windows(texts: Iterable[Item]) -> Iterator[list[Item]]:
    waiting = iter(texts)
    while part := list(islice(waiting, WINDOW)):
        yield part


def _numbered(texts: Iterable[Item]) -> Iterator[tuple[int, list[Item]]]:
    """Yield windows with the number of their first text, from 1."""
    return ((1 + place * WINDOW, part) for place, part in enumerate(_windows(texts)))


def _joined(parts: list[Vectors], width: int) -> Any:
    import numpy as np

    return np.concatenate(parts) if parts else np.empty((0, width), np.float32)


def _tasks(folder: Path) -> tuple[str, ...]:
    return tuple(path.name for path in folders_of_tasks(folder))


def _pretrained(initial: Initial, run: BertRun) -> Trained:
    """Return an encoder of others; heads that it lacks are never asked."""
    known, device = vocabulary(initial.tokens, initial.lowercase), set_up_machine(run, predicts=True)
    network = blank_model(run, known, device)
    own = network.state_dict()
    reader.fill(network, own | {name: tensor for name, tensor in initial.state.items() if name in own}, Path(initial.source))
    network = at_work(network, run.precision, device)
    tokenizer = build_tokenizer(initial.tokens, initial.lowercase, compose=True)
    facts = {"kind": "mask", "lacks": "mlm" in initial.lacks()}
    return Trained(network, tokenizer, known, device, DTYPES[run.precision], run.model.max_position_embeddings, facts)


def _with_head(initial: Initial, run: BertRun, folder: Path, kind: str, labels: list[str], reads: str) -> Trained:
    """Return the model of a task in a folder of Hugging Face."""
    known, device = vocabulary(initial.tokens, initial.lowercase), set_up_machine(run, predicts=True)
    state, _, _ = load_pretrained(folder)
    state = {**{name: tensor for name, tensor in state.items() if name.startswith("head.")}, **initial.state}
    with to_be_filled():
        network = task_model(kind, len(labels), run, known.size)
    wanted = network.state_dict()
    if missing := sorted(wanted.keys() - state.keys()):
        raise DataError(f"{folder}: its weights lack {missing[0]}, which its config.json promises; copy it again")
    reader.fill(network, {name: state[name] for name in wanted}, folder)
    network = at_work(network, run.precision, device)
    longest = longest_text(folder, run.model.max_position_embeddings)
    reader_of = {"spans": "squad", "token_classification": "tokens"}
    said = task_settings(folder) or ({"task": reads} if kind_of_glue(reads) == kind else {})
    spec = {
        "task": reader_of.get(kind) or said.get("task", "csv"),
        "columns": said.get("columns"),
        "seq_len": longest,
        "doc_stride": said.get("doc_stride", min(DOC_STRIDE, longest // 4)),
        "max_answer_length": said.get("max_answer_length", MAX_ANSWER),
    }
    metrics = {"null_threshold": said.get("null_threshold")}
    facts = {"kind": kind, "labels": labels, "pairs": said.get("pairs"), "spec": spec, "result": {"metrics": metrics}}
    tokenizer = build_tokenizer(initial.tokens, initial.lowercase, compose=True)
    return Trained(network, tokenizer, known, device, DTYPES[run.precision], longest, facts)
