"""What a recipe may say: frozen dataclasses that hold no behavior and need nothing but the standard library.

Import them from :mod:`overnight.config`, which reads and checks them. The text below a field is its `--help`. An annotation says which numbers a
setting may be, and :data:`MACHINE` that it is no part of a run's identity. What only one kind of model, phase or optimizer has stands in its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from overnight.config.data import Data
from overnight.config.fields import MACHINE, BelowOne, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, Tagged
from overnight.config.folders import folder_of
from overnight.config.machine import Checkpoint, Compute, Distributed, Logging, Memory, Stability
from overnight.config.phases import BertPhase, BytePhase, Phase
from overnight.config.search import Search


@dataclass(frozen=True)
class Model:
    """What every network has."""

    kind: str = ""
    """Which network: `bert`, `modernbert`; of bytes `mlstm` (a multiplicative LSTM), `lstm` or `transformer` (causal)."""
    num_layers: PositiveInt = 12
    """Layers."""
    hidden_size: PositiveInt = 768
    """Width of the hidden states."""


@dataclass(frozen=True)
class TransformerConfig(Model):
    """What networks of attention have."""

    num_heads: PositiveInt = 12
    """Attention heads; must divide `hidden_size`."""
    intermediate_size: NonNegativeInt = 0
    """Width inside the feed-forward part; 0 is four times `hidden_size`."""
    max_position_embeddings: PositiveInt = 512
    """Learned positions (tokens or bytes); no phase may be longer."""
    dropout: BelowOne = 0.1
    """Dropout of embeddings, attention output and feed-forward output (probability)."""


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """A BERT encoder as published (post-LayerNorm, GELU, learned positions)."""

    kind: Literal["bert"] = "bert"
    """BERT."""
    attention_dropout: BelowOne = 0.1
    """Dropout of attention probabilities (probability)."""


@dataclass(frozen=True)
class ModernBertConfig(TransformerConfig):
    """An encoder of ModernBERT's form: pre-LayerNorm, rotary positions, gated GELU, no biases, a final norm (Warner et al. 2024, arXiv 2412.13663)."""

    kind: Literal["modernbert"] = "modernbert"
    """ModernBERT."""
    size: Literal["given", "auto"] = "given"
    """`auto` chooses `num_layers`, `hidden_size` and `num_heads`, which are then left out, for the `budget`, this machine and the amount of text (docs/size.md); also `data.vocab_size` and `global_batch_size` where they are 0. `given` takes them as they are."""
    intermediate_size: NonNegativeInt = 0
    """Width inside the feed-forward part, of each half; 0 is 8/3 of `hidden_size`, down to a multiple of 32, which has the parameters of four times without gates."""
    max_position_embeddings: PositiveInt = 512
    """Longest sequence that it is made for (tokens); rotary positions have no parameters."""
    dropout: BelowOne = 0.0
    """Dropout of embeddings, attention output and inside the feed-forward part (probability)."""
    local_attention: NonNegativeInt = 0
    """Window of the local layers: a token sees those at most half as many tokens away. 0: all layers are global."""
    global_attention_every: PositiveInt = 3
    """With `local_attention`: of so many layers the first is global."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary positions of global layers."""
    local_rope_theta: PositiveFloat = 10000.0
    """Base of the rotary positions of local layers."""
    init: Literal["megatron", "zero", "normal"] = "megatron"
    """Projections into the residual stream begin from N(0, 0.02) divided by √(2 `num_layers`), from zero, or from N(0, 0.02) as all else."""
    unigram_bias: bool = True
    """Begin with the logarithm of each token's frequency as its logit, instead of learning it."""
    pooling: Literal["mean", "cls"] = "mean"
    """What stands for a sequence in classification: the mean of its tokens, or its first."""


EncoderConfig = Annotated[BertConfig | ModernBertConfig, Tagged("kind", "bert")]


@dataclass(frozen=True)
class RecurrentLMConfig(Model):
    """A multiplicative LSTM or an LSTM over bytes."""

    kind: Literal["mlstm", "lstm"] = "mlstm"
    """A multiplicative LSTM, or an LSTM."""
    embedding_size: PositiveInt = 64
    """Width of the embedding of a byte."""
    weight_norm: bool = True
    """Weight normalization of the input and hidden matrices."""


@dataclass(frozen=True)
class CausalLMConfig(TransformerConfig):
    """A causal Transformer over bytes (pre-LayerNorm, GELU, learned positions)."""

    kind: Literal["transformer"] = "transformer"
    """A causal Transformer."""


ByteLMConfig = Annotated[RecurrentLMConfig | CausalLMConfig, Tagged("kind", "mlstm")]
MODELS: dict[str, type[Model]] = {
    "bert": BertConfig,
    "modernbert": ModernBertConfig,
    "mlstm": RecurrentLMConfig,
    "lstm": RecurrentLMConfig,
    "transformer": CausalLMConfig,
}
"""The settings of each network by its kind."""


@dataclass(frozen=True)
class Columns:
    """The columns (of JSON lines: the keys) of a table of one's own, where they are not called as the task expects."""

    text: str = ""
    """`csv`: column of the text, or of the first of a pair; empty is `text`, or `text_a` where there is one."""
    text_b: str = ""
    """`csv`: column of the second text of a pair; empty is `text_b` beside `text_a`, else none."""
    label: str = ""
    """`csv`: column of the class; empty is `label`."""
    labels: str = ""
    """`csv`: column of any number of classes, as a JSON list or joined by `|`; or the columns of the classes, joined by commas, each with 0 or 1; empty is `labels`."""
    score: str = ""
    """`csv`: column of the number to predict, instead of a class; empty is `score`."""
    id: str = ""
    """`csv`: column of the row's own name, by which it is answered; empty is `id` where there is one, else the number of the row."""


@dataclass(frozen=True)
class Finetune:
    """A task the pretrained encoder is fine-tuned on after the last phase."""

    task: Literal[
        "docnames", "cola", "mrpc", "rte", "stsb", "sst2", "qnli", "wnli", "mnli", "qqp", "sst", "imdb", "csv", "squad", "tokens"
    ] = "docnames"
    """Which task; `docnames` is made from the embedded documentation, `csv` is your own table (.csv, .tsv, .jsonl, .parquet), `tokens` words with tags (.conll, .jsonl), `squad` also questions of your own in its format."""
    path: str = ""
    """Folder (or file) with the task's data, in its original layout; of `csv` and `squad` also the file to train on. `$NAME` is read from the environment."""
    dev: str = ""
    """`csv`, `squad`, `tokens`: file to score on, where `path` is the file to train on; empty is the one in the folder, else a part is split off."""
    dev_share: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    """`csv`, `tokens`: share (above 0, below 1) of the texts that is split off to score on where there is no file for that, of each class alike."""
    dev_seed: int = 0
    """Which texts are split off, by it or by `select_on: train`; the seeds of the training all score on the same. Of `docnames`, which rows are made."""
    columns: Columns = field(default_factory=Columns)
    """Names of the columns of your own table."""
    class_weights: str = ""
    """Of classes: `balanced` weighs each class inversely to its rows, `LABEL=3,LABEL=1` as it says (others 1); scaled so that the mean over the training rows is 1. Empty: all alike."""
    epochs: PositiveFloat = 3.0
    """Passes over the training rows."""
    global_batch_size: PositiveInt = 32
    """Rows in one optimizer step."""
    micro_batch_size: PositiveInt = 32
    """Rows a device holds at once."""
    optimizer: Literal["adamw", "lamb", "muon"] = "adamw"
    """AdamW as published, LAMB, or Muon for the matrices (AdamW for the rest), which learns more of each row."""
    lr: NonNegativeFloat = 0.0
    """Peak learning rate; 0 takes the one that fits the optimizer and the width of the network: AdamW 3e-4 up to a width of 256, 5e-5 at 768; Muon and LAMB 1e-3."""
    layer_lr_decay: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    """Factor (above 0, at most 1) from the learning rate of each layer to that of the one below it (Clark et al. 2020); the head takes `lr`, the embeddings least. 1: all alike."""
    warmup_ratio: Fraction = 0.1
    """Share of the steps spent warming up (0 to 1); linear decay to 0 follows."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled decay; biases and norm parameters have none."""
    keep_best: bool = False
    """Score the network every `eval_every` epochs on the rows of `select_on`, and keep the best; false keeps the last."""
    patience: NonNegativeInt = 0
    """Stop early, after so many scorings in a row without a better score, and keep the best; the learning rate falls as if all epochs were trained. 0 trains all."""
    eval_every: PositiveFloat = 1.0
    """Epochs between two scorings, with `keep_best` or `patience`."""
    select_on: Literal["train", "dev"] = "train"
    """Rows that `keep_best`, `patience` and `search` choose by: `train` holds a part of the training rows back, which is not trained on; `dev` takes the rows whose score is reported, which is then a little too good."""
    select_share: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    """Share (above 0, below 1) of the training texts that `select_on: train` holds back, of each class alike."""
    reinit_layers: NonNegativeInt = 0
    """Top layers of the encoder that begin from random weights, and the pooler with them, instead of pretrained ones, which may steady small tasks (Zhang et al. 2021); 0 is none."""
    seq_len: int = 128
    """Longest sequence (tokens)."""
    doc_stride: PositiveInt = 128
    """SQuAD: tokens by which successive windows of a long paragraph advance."""
    max_answer_length: PositiveInt = 30
    """SQuAD: longest answer (tokens)."""
    max_misplaced_answers: Fraction = 0.001
    """`squad`: share of answers (0 to 1) that may not stand at their `answer_start`; they are counted and not trained on. More are an error."""
    max_train_examples: NonNegativeInt = 0
    """Training rows (SQuAD: questions) used at most, drawn by a hash of their texts with each label in its share, the same for every seed; 0 is all."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """One fine-tuning a seed; the median and the spread are reported."""
    random_init_seeds: NonNegativeInt = 0
    """With so many of the seeds, the first, the same network is also trained from random init, to compare with."""
    search: Search = field(default_factory=Search)
    """Settings to try first."""

    @property
    def selects_epoch(self) -> bool:
        """Whether the state of an epoch is chosen by its score."""
        return self.keep_best or self.patience > 0

    @property
    def selects(self) -> bool:
        """Whether anything is chosen by a score, so that rows are needed for the choice."""
        return self.selects_epoch or bool(self.search.combinations)


@dataclass(frozen=True)
class Evaluation:
    """What is measured of the pretrained network at the end of `overnight run`, besides bits per character and masked accuracy on the validation text."""

    blimp: str = ""
    """BLiMP: its archive, or a folder with its `data/*.jsonl`; empty leaves it out. `$NAME` is read from the environment."""
    blimp_pairs: NonNegativeInt = 100
    """Pairs of each paradigm that are scored, drawn by a hash; 0 is all."""


@dataclass(frozen=True)
class LinearProbe:
    """A task on which the frozen features of a pretrained byte model are evaluated by a logistic regression."""

    task: Literal["sst", "imdb", "csv"] = "sst"
    """Which task; `csv` is your own table (.csv, .tsv, .jsonl)."""
    path: str = ""
    """Folder (or file) with the task's data, in its original layout. `$NAME` is read from the environment."""
    columns: Columns = field(default_factory=Columns)
    """Names of the columns of your own table."""
    features: Literal["cell", "hidden", "mean", "cell+hidden", "cell+mean", "cell+hidden+mean"] = "cell"
    """What describes a text: the last cell state, the last hidden state, the mean of the hidden states, or several side by side."""
    max_train_examples: NonNegativeInt = 0
    """Training rows used at most, drawn by a hash of their texts and the seed with each label in its share; 0 is all."""
    seeds: list[Annotated[int, Range(0, 2**32 - 1)]] = field(default_factory=lambda: [0])
    """Seeds (0 to 2^32-1) of the random weights, of what is split off for validation and of the rows that are drawn; the median and the spread are reported."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a run does: data, model, phases, tasks, and how this machine carries it out."""

    name: str
    """Name of the run."""
    out: Annotated[str, MACHINE] = "runs/{name}"
    """Run folder; `{name}` is the name of the run, `~` your home folder."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of initialization, order, pairs, masks and dropout (0 to 2^32-1)."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"] = "fp32"
    """Type of matrix products and activations; weights, optimizer, norms and loss are fp32 always. auto is bf16, but without hardware for it fp16 on a GPU and fp32 on a CPU; a run keeps what it began with. tf32 is for GPUs, a CPU computes fp32; fp16 has an automatic loss scale; fp8 is bf16 with the matrix products of the layers in 8 bits (the extra `fp8`, compute capability 8.9; on an H200 slower than bf16); int8 is so on a CPU, to predict and embed only."""
    budget: str = ""
    """Time that everything may take, such as `8h`, `1h30m` or `until 07:00`; the `steps` of the phases are then their shares of it. Needs `schedule.name: wsd`. Empty takes the steps as they are; so does `--budget=null`."""
    data: Data = field(default_factory=Data)
    """The corpus."""
    model: Model = field(default_factory=Model)
    """The network."""
    phases: Mapping[str, Phase]
    """Pretraining phases, in order."""
    compute: Annotated[Compute, MACHINE] = field(default_factory=Compute)
    """Where and how this machine computes."""
    memory: Annotated[Memory, MACHINE] = field(default_factory=Memory)
    """Less memory for more time."""
    distributed: Distributed = field(default_factory=Distributed)
    """How many processes share a step."""
    stability: Annotated[Stability, MACHINE] = field(default_factory=Stability)
    """What is done at steps that should not stand."""
    checkpoint: Annotated[Checkpoint, MACHINE] = field(default_factory=Checkpoint)
    """When the state of the training is saved, and what is kept."""
    logging: Annotated[Logging, MACHINE] = field(default_factory=Logging)
    """What is measured and written on the way."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return folder_of(self.out, self.name)

    @property
    def data_dir(self) -> Path:
        """The folder of the prepared shards."""
        return folder_of(self.data.dir, self.name)


@dataclass(frozen=True, kw_only=True)
class BertRun(Run):
    """A run of an encoder, BERT or ModernBERT, on WordPiece tokens."""

    phases: Mapping[str, BertPhase]
    """Pretraining phases, in order."""
    model: EncoderConfig = field(default_factory=BertConfig)
    """The network."""
    init: str = ""
    """What pretraining begins from: a run folder, or a checkpoint of others (docs/checkpoints.md), such as `hf:google-bert/bert-base-uncased`; its vocabulary and casing come along, and what `model` leaves out is its own. Empty begins from random weights. `$NAME` is read from the environment."""
    evaluation: Annotated[Evaluation, MACHINE] = field(default_factory=Evaluation)
    """What is measured after pretraining."""
    finetune: Annotated[Mapping[str, Finetune], MACHINE] = field(default_factory=dict)
    """Fine-tuning after pretraining, by name."""

    @property
    def predicts_next_sentence(self) -> bool:
        """Whether any phase has next-sentence prediction."""
        return any(phase.nsp for phase in self.phases.values())

    @property
    def matches_tokens(self) -> bool:
        """Whether any phase has token matching."""
        return any(phase.token_matching for phase in self.phases.values())


@dataclass(frozen=True, kw_only=True)
class ByteRun(Run):
    """A run of a language model of bytes."""

    phases: Mapping[str, BytePhase]
    """Pretraining phases, in order."""
    model: ByteLMConfig = field(default_factory=RecurrentLMConfig)
    """The network."""
    linear_probe: Annotated[Mapping[str, LinearProbe], MACHINE] = field(default_factory=dict)
    """Tasks on which its features are evaluated after pretraining, by name."""

    @property
    def predicts_label(self) -> bool:
        """Whether the network has the head of the auxiliary objective."""
        return any(phase.label_weight > 0 for phase in self.phases.values())


RUNS: dict[str, type[Run]] = {"bert": BertRun, "modernbert": BertRun, "mlstm": ByteRun, "lstm": ByteRun, "transformer": ByteRun}
"""The kind of run by the kind of its network."""
ENCODERS = tuple(kind for kind, run in RUNS.items() if run is BertRun)
"""The kinds of networks that read WordPiece tokens; the others read bytes."""
