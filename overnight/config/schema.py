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
    """Network: encoders `bert` and `modernbert`; byte models `mlstm` (multiplicative LSTM), `lstm` and `transformer` (causal)."""
    num_layers: PositiveInt = 12
    """Number of layers."""
    hidden_size: PositiveInt = 768
    """Width of the hidden states."""


@dataclass(frozen=True)
class TransformerConfig(Model):
    """What networks of attention have."""

    num_heads: PositiveInt = 12
    """Number of attention heads; must divide `hidden_size`."""
    intermediate_size: NonNegativeInt = 0
    """Width of the feed-forward layer; 0: four times `hidden_size`."""
    max_position_embeddings: PositiveInt = 512
    """Number of learned positions (tokens or bytes); no phase may have longer sequences."""
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
    """`auto` chooses `num_layers`, `hidden_size`, `num_heads` and `intermediate_size` for the `budget`, this machine and the amount of text (docs/size.md); leave them out. It also chooses `data.vocab_size` and `global_batch_size` where they are 0. `given` uses the sizes of the recipe."""
    intermediate_size: NonNegativeInt = 0
    """Width of each half of the gated feed-forward layer; 0: 8/3 of `hidden_size`, rounded down to a multiple of 32, which has as many parameters as four times `hidden_size` without gates."""
    max_position_embeddings: PositiveInt = 512
    """Longest sequence that the network is built for (tokens); rotary positions have no parameters."""
    dropout: BelowOne = 0.0
    """Dropout of embeddings, attention output and inside the feed-forward part (probability)."""
    local_attention: NonNegativeInt = 0
    """Window of the local layers (tokens): a token attends to those at most half as many tokens away. 0: all layers are global."""
    global_attention_every: PositiveInt = 3
    """Interval of the global layers with `local_attention`, beginning with the first layer."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary positions of global layers."""
    local_rope_theta: PositiveFloat = 10000.0
    """Base of the rotary positions of local layers."""
    init: Literal["megatron", "zero", "normal"] = "megatron"
    """Initialization of the projections into the residual stream: N(0, 0.02) divided by √(2 `num_layers`), zero, or N(0, 0.02) as all other weights."""
    unigram_bias: bool = True
    """Start each token's output bias at the logarithm of its frequency, so that the network need not learn it."""
    pooling: Literal["mean", "cls"] = "mean"
    """What represents a sequence in classification: the mean of its tokens, or its first token."""


EncoderConfig = Annotated[BertConfig | ModernBertConfig, Tagged("kind", "bert")]


@dataclass(frozen=True)
class RecurrentLMConfig(Model):
    """A multiplicative LSTM or an LSTM over bytes."""

    kind: Literal["mlstm", "lstm"] = "mlstm"
    """A multiplicative LSTM, or an LSTM."""
    embedding_size: PositiveInt = 64
    """Width of the embedding of a byte."""
    weight_norm: bool = True
    """Use weight normalization for the input and hidden matrices."""


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
    """`csv`: column of the text, or of the first text of a pair; empty: `text_a` if there is one, else `text`."""
    text_b: str = ""
    """`csv`: column of the second text of a pair; empty: `text_b` if `columns.text` is empty too and there is a `text_a`, else none."""
    label: str = ""
    """`csv`: column of the class; empty: `label`."""
    labels: str = ""
    """`csv`: column of any number of classes, as a JSON list or joined by `|`; or one column per class, each 0 or 1, as names joined by commas. Empty: `labels`."""
    score: str = ""
    """`csv`: column of the number to predict, instead of a class; empty: `score`."""
    id: str = ""
    """`csv`: column of the row's id, which its answer repeats; empty: `id` if there is one, else the row's number."""


@dataclass(frozen=True)
class Finetune:
    """A task the pretrained encoder is fine-tuned on after the last phase."""

    task: Literal[
        "docnames", "cola", "mrpc", "rte", "stsb", "sst2", "qnli", "wnli", "mnli", "qqp", "sst", "imdb", "csv", "squad", "tokens"
    ] = "docnames"
    """Task: `docnames` is made from the documentation inside Python, `csv` is your own table (.csv, .tsv, .jsonl, .parquet), `tokens` is words with tags (.conll, .jsonl), `squad` also takes your own questions in its format."""
    path: str = ""
    """Folder (or file) with the task's data, in its original layout; for `csv`, `squad` and `tokens` also the training file. `$NAME` is read from the environment."""
    dev: str = ""
    """`csv`, `squad`, `tokens`: file to score on, if `path` is the training file; empty: the one in the folder, or else a part that is split off."""
    dev_share: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    """`csv`, `tokens`: share of the texts (above 0, below 1) to split off for scoring if no file is given for it, stratified by class."""
    dev_seed: int = 0
    """Seed of what is split off, for scoring or by `select_on: train`; all `seeds` are scored on the same texts. `docnames`: which rows are made."""
    columns: Columns = field(default_factory=Columns)
    """Names of the columns of your own table."""
    class_weights: str = ""
    """Weights of the classes in the loss: `balanced` weights each class inversely to its number of rows; `LABEL=3,LABEL=1` names them (others 1). They are scaled to a mean of 1 over the training rows. Empty: all equal."""
    epochs: PositiveFloat = 3.0
    """Passes over the training rows."""
    global_batch_size: PositiveInt = 32
    """Rows per optimizer step."""
    micro_batch_size: PositiveInt = 32
    """Rows a device processes at once."""
    optimizer: Literal["adamw", "lamb", "muon"] = "adamw"
    """Optimizer: AdamW as published, LAMB, or Muon for the matrices (AdamW for the rest), which learns more from each row."""
    lr: NonNegativeFloat = 0.0
    """Peak learning rate. 0: the one that fits the optimizer and the width of the network: AdamW 3e-4 up to a width of 256, 5e-5 at 768; Muon and LAMB 1e-3."""
    layer_lr_decay: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    """Factor (above 0, at most 1) from each layer's learning rate to that of the layer below; the head uses `lr`, the embeddings the lowest rate (Clark et al. 2020). 1: all equal."""
    warmup_ratio: Fraction = 0.1
    """Share of the steps that warm up (0 to 1); linear decay to 0 follows."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; biases and norm parameters have none."""
    keep_best: bool = False
    """Score the network on the rows of `select_on` every `eval_every` epochs, and keep the best state; false keeps the last."""
    patience: NonNegativeInt = 0
    """Stop after so many scorings in a row without a better score, and keep the best state; the learning rate decays as if all epochs were trained. 0: train all."""
    eval_every: PositiveFloat = 1.0
    """Epochs between scorings, with `keep_best` or `patience`."""
    select_on: Literal["train", "dev"] = "train"
    """Rows by which `keep_best`, `patience` and `search` choose: `train` sets aside a part of the training rows, which is not trained on; `dev` uses the rows whose score is reported, so that score is a little too good."""
    select_share: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    """Share (above 0, below 1) of the training texts that `select_on: train` sets aside, stratified by class."""
    reinit_layers: NonNegativeInt = 0
    """Number of top encoder layers to start from random weights instead of pretrained ones, together with the pooler; may stabilize small tasks (Zhang et al. 2021). 0: none."""
    seq_len: int = 128
    """Maximum sequence length (tokens)."""
    doc_stride: PositiveInt = 128
    """SQuAD: tokens by which the window over a long paragraph advances."""
    max_answer_length: PositiveInt = 30
    """SQuAD: maximum answer length (tokens)."""
    max_misplaced_answers: Fraction = 0.001
    """`squad`: share of answers (0 to 1) that may be missing at their `answer_start`; these are counted and not trained on. More are an error."""
    max_train_examples: NonNegativeInt = 0
    """Maximum number of training rows (SQuAD: questions), drawn by a hash of their texts, stratified by label, the same for every seed. 0: all."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds, with one fine-tuning each; the median and the spread are reported."""
    random_init_seeds: NonNegativeInt = 0
    """Number of seeds, from the first, with which the same network is also trained from random init, for comparison."""
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
    """BLiMP: its archive, or a folder with its `data/*.jsonl`; empty skips it. `$NAME` is read from the environment."""
    blimp_pairs: NonNegativeInt = 100
    """Pairs to score per paradigm, drawn by a hash; 0: all."""


@dataclass(frozen=True)
class LinearProbe:
    """A task on which the frozen features of a pretrained byte model are evaluated by a logistic regression."""

    task: Literal["sst", "imdb", "csv"] = "sst"
    """Task; `csv` is your own table (.csv, .tsv, .jsonl)."""
    path: str = ""
    """Folder (or file) with the task's data, in its original layout. `$NAME` is read from the environment."""
    columns: Columns = field(default_factory=Columns)
    """Names of the columns of your own table."""
    features: Literal["cell", "hidden", "mean", "cell+hidden", "cell+mean", "cell+hidden+mean"] = "cell"
    """Features of a text: the last cell state, the last hidden state, the mean of the hidden states, or several side by side."""
    max_train_examples: NonNegativeInt = 0
    """Maximum number of training rows, drawn by a hash of their texts and the seed, stratified by label. 0: all."""
    seeds: list[Annotated[int, Range(0, 2**32 - 1)]] = field(default_factory=lambda: [0])
    """Seeds (0 to 2^32-1) of the network with random weights, the validation split and the rows that are drawn; the median and the spread are reported."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a run does: data, model, phases, tasks, and how this machine carries it out."""

    name: str
    """Name of the run."""
    out: Annotated[str, MACHINE] = "runs/{name}"
    """Run folder; `{name}` is the name of the run, `~` your home folder."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of the initialization, order, pairs, masks and dropout (0 to 2^32-1)."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"] = "fp32"
    """Type of the matrix products and activations; weights, optimizer, norms and loss are always fp32. auto is bf16 where the hardware supports it, else fp16 on a GPU and fp32 on a CPU; a run keeps the precision it began with. tf32 is for GPUs, a CPU computes fp32; fp16 has an automatic loss scale; fp8 is bf16 with the matrix products of the layers in 8 bits (the extra `fp8`, compute capability 8.9 or newer; on an H200 slower than bf16); int8 is the same on a CPU, only for predict, embed and serve."""
    budget: str = ""
    """Maximum time for everything, such as `8h`, `1h30m` or `until 07:00`; the `steps` of the phases then only set their shares of it. Needs `schedule.name: wsd`. Empty, or `--budget=null`, trains the steps as they are."""
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
    """How several processes share a step."""
    stability: Annotated[Stability, MACHINE] = field(default_factory=Stability)
    """What to do about gradients that are not finite, spikes, and replicas that differ."""
    checkpoint: Annotated[Checkpoint, MACHINE] = field(default_factory=Checkpoint)
    """When to save the training state, and which checkpoints to keep."""
    logging: Annotated[Logging, MACHINE] = field(default_factory=Logging)
    """What to measure and log during training."""

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
    """What pretraining starts from: a run folder, or another program's checkpoint (docs/checkpoints.md) such as `hf:google-bert/bert-base-uncased`. Its vocabulary and casing are used, and it sets what `model` leaves out. Empty: random weights. `$NAME` is read from the environment."""
    evaluation: Annotated[Evaluation, MACHINE] = field(default_factory=Evaluation)
    """What is measured after pretraining."""
    finetune: Annotated[Mapping[str, Finetune], MACHINE] = field(default_factory=dict)
    """Tasks to fine-tune on after pretraining, by name."""

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
    """Tasks on which the features are evaluated after pretraining, by name."""

    @property
    def predicts_label(self) -> bool:
        """Whether the network has the head of the auxiliary objective."""
        return any(phase.label_weight > 0 for phase in self.phases.values())


RUNS: dict[str, type[Run]] = {"bert": BertRun, "modernbert": BertRun, "mlstm": ByteRun, "lstm": ByteRun, "transformer": ByteRun}
"""The kind of run by the kind of its network."""
ENCODERS = tuple(kind for kind, run in RUNS.items() if run is BertRun)
"""The kinds of networks that read WordPiece tokens; the others read bytes."""
