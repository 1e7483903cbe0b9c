"""What a recipe may say: frozen dataclasses that hold no behaviour and need nothing but the standard library.

Import them from :mod:`overnight.config`, which reads and checks them. The text below a field is its `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

# Plain dicts, not pydantic.ConfigDict, so that importing this module costs nothing.
_STRICT = {"extra": "forbid", "use_attribute_docstrings": True}


class Reference(NamedTuple):
    """A peak learning rate and a warm-up (share of the steps), and the batch for which they hold (sequences)."""

    lr: float
    warmup: float
    batch: int


UNTUNED = Reference(6.25e-4, 1 / 320, 512)
"""You et al. 2019 (arXiv 1904.00962, table 4): where the rule for untuned LAMB begins."""
PURI_STEPS = 100_000
"""Puri et al. 2018 (arXiv 1812.01466): steps after which the rate would be 0."""


@dataclass(frozen=True)
class Data:
    """Where the text comes from and how it becomes token shards."""

    __pydantic_config__ = _STRICT
    paths: list[str] = field(default_factory=lambda: ["builtin:python-docs"])
    """Files, folders, globs or tar archives, in order; `builtin:python-docs` is the documentation inside this Python environment. `$NAME` is read from the environment; `ARCHIVE::PATTERN` takes only the members of a tar archive whose names match (`reviews.tar.xz::*/train/*`; `*` matches `/` too)."""
    units: Literal["wordpiece", "bytes"] = "wordpiece"
    """What a token is: a WordPiece, for BERT, or a byte of UTF-8, for the byte models."""
    dir: str = "data/{name}"
    """Folder for the prepared shards; `{name}` is the name of the run."""
    format: Literal["auto", "text", "markdown", "jsonl", "wiki"] = "auto"
    """How a file is read; `auto` decides by its ending and its first bytes (`wiki` is the extracted `<doc>` format)."""
    field: str = "text"
    """Key that holds the text in JSON lines."""
    documents: Literal["file", "paragraph", "line"] = "file"
    """What one document of a plain text file is: the whole file, a block between blank lines, or a line."""
    min_chars: int = 100
    """Shorter documents are dropped (characters, after cleaning)."""
    valid_fraction: float = 0.01
    """Share of documents held out, chosen by a hash of the document (0 to 0.5)."""
    test_fraction: float = 0.0
    """`bytes`: share of documents kept apart for `overnight evaluate`, chosen like those held out (0 to 0.5)."""
    label: str = ""
    """`bytes`: key of a number in JSON lines, kept with each document for the auxiliary objective (`phases.*.label_weight`)."""
    vocab_file: str = ""
    """A given WordPiece vocabulary (`vocab.txt`, one piece a line); empty trains one."""
    vocab_size: int = 30522
    """Number of pieces: of the vocabulary to train, or exactly of the given file."""
    lowercase: bool = True
    """Lower-case and strip accents, as in the uncased models."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """What to do at a byte that is not UTF-8: stop and name its offset, or put U+FFFD there."""
    truncated: Literal["error", "keep"] = "error"
    """What to do with a compressed file that ends early: stop, or keep and count what was readable."""
    max_bad_lines: int = 0
    """JSON lines that may be skipped because they do not parse or lack the field (count over all files)."""
    workers: int = 0
    """Processes that prepare; 0 takes every core. The shards do not depend on it."""


@dataclass(frozen=True)
class Model:
    """A BERT encoder as published (post-LayerNorm, GELU, learned positions), or a language model of bytes."""

    __pydantic_config__ = _STRICT
    kind: Literal["bert", "mlstm", "lstm", "transformer"] = "bert"
    """Which network: BERT; of bytes a multiplicative LSTM, an LSTM or a causal Transformer."""
    layers: int = 12
    """Layers."""
    width: int = 768
    """Hidden width."""
    embedding: int = 64
    """`mlstm`, `lstm`: width of the embedding of a byte."""
    weight_norm: bool = True
    """`mlstm`, `lstm`: weight normalisation of the input and hidden matrices."""
    heads: int = 12
    """Attention heads; must divide the width."""
    ffn: int = 0
    """Inner width of the feed-forward part; 0 is four times the width."""
    max_length: int = 512
    """Learned positions (tokens), of BERT and of the Transformer; no phase may be longer."""
    dropout: float = 0.1
    """Dropout of embeddings, attention output and feed-forward output (probability)."""
    attention_dropout: float = 0.1
    """Dropout of attention probabilities (probability)."""


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor as a function of the step: linear warm-up, then decay to zero."""

    __pydantic_config__ = _STRICT
    name: Literal["linear", "poly", "poly_nvidia", "hold", "cosine", "constant", "puri"] = "poly"
    """Shape of the decay. `poly_nvidia` is (1-t/T)^power, which jumps down where the warm-up ends, with factor 0 at the last step; `hold` stays at the peak for a while (LANS, WSD); `puri` is linear over 100,000 steps without a warm-up."""
    warmup: float = 0.1
    """Share of the schedule's steps spent warming up linearly from 0 (0 to 1); `puri` has none."""
    power: float = 1.0
    """`poly`, `poly_nvidia`, `hold`: exponent of the decay; 1 is linear."""
    hold: float = 0.0
    """`hold`: share of the schedule's steps spent at the peak (0 to 1)."""
    total: int = 0
    """Steps of the whole schedule where it is longer than the phase; 0 is the phase's own steps (`puri`: 100,000)."""
    offset: int = 0
    """Step of the schedule at which this phase begins."""


@dataclass(frozen=True)
class Scaling:
    """How the peak learning rate follows the phase's global batch B (with a batch warm-up: the full one)."""

    __pydantic_config__ = _STRICT
    rule: Literal["none", "linear", "sqrt", "lamb_untuned"] = "none"
    """The peak is `lr`, `lr`·B/batch or `lr`·√(B/batch); `lamb_untuned` (You et al.) is the last with a warm-up whose share grows as B/batch."""
    batch: int = 0
    """Batch for which `lr` (and for `lamb_untuned` `schedule.warmup`) was tuned (sequences); `lamb_untuned`: 0 is the paper's rate 6.25e-4 and warm-up 1/320 at 512."""


@dataclass(frozen=True)
class Optim:
    """The optimizer of a phase."""

    __pydantic_config__ = _STRICT
    name: Literal["lamb", "lans", "lars", "adamw", "muon"] = "lamb"
    """Which optimizer; `muon` takes the matrices, with AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate, for the global batch unless `scaling` says for which; never scaled by the number of GPUs."""
    betas: tuple[float, float] = (0.9, 0.999)
    """LAMB, LANS, AdamW (also beside Muon): decay of the first and second moment (each 0 to 1)."""
    eps: float = 1e-6
    """LAMB, LANS, AdamW (also beside Muon): added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decay, decoupled but for LARS, where it is part of the gradient; biases and norm parameters have none."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 is no clipping. LANS normalises every gradient and never clips."""
    momentum: float = 0.9
    """LARS, Muon: share of the momentum that is kept (0 to 1)."""
    nesterov: bool = False
    """LARS: Nesterov's momentum; Muon always has it."""
    trust_coefficient: float = 1e-3
    """LARS: factor of the ratio |x| / |g|."""
    lr_in_momentum: bool = True
    """LARS: the learning rate is inside the momentum, as in the paper; false is outside, as in most PyTorch code."""
    bias_correction: bool = True
    """LAMB: divide the moments by 1-β^t; LANS, AdamW and Muon's AdamW always do."""
    trust_clip: float = 0.0
    """LAMB: upper bound of the trust ratio; 0 is none."""
    adapt: Literal["matrices", "all", "none"] = "matrices"
    """LAMB, LANS, LARS: which tensors take the trust ratio; `matrices` leaves out biases and norm parameters."""
    skip_zero_grad: bool = True
    """LAMB, LANS, LARS: leave a tensor whose gradient is exactly 0 alone, as if it had none."""
    scaling: Scaling = field(default_factory=Scaling)
    """Rule for the learning rate at another batch."""
    schedule: Schedule = field(default_factory=Schedule)
    """Learning-rate schedule."""
    start: Literal["reset", "keep"] = "reset"
    """Moments at the start of the phase: fresh, or those of the phase before (whose step count restarts with the schedule, as NVLAMB does)."""


@dataclass(frozen=True)
class BatchWarmup:
    """A batch that grows to the global one: by `start` sequences at a time, on a line over the steps."""

    __pydantic_config__ = _STRICT
    start: int = 0
    """Sequences of the first step; must divide the global batch. 0 is the global batch from the first step on."""
    steps: int = 0
    """Steps before the first one with the global batch."""


@dataclass(frozen=True)
class Phase:
    """A stretch of pretraining at one length, batch and schedule."""

    __pydantic_config__ = _STRICT
    steps: int
    """Optimizer steps."""
    global_batch: int
    """Sequences in one optimizer step, over all devices and micro-batches."""
    batch_warmup: BatchWarmup = field(default_factory=BatchWarmup)
    """Smaller batches at the beginning."""
    length: int = 128
    """Longest sequence (tokens, with [CLS] and [SEP])."""
    micro_batch: int = 32
    """Sequences a device holds at once; decides memory and speed, never the training. 0: found by trial at the start of the phase, and remembered in the run folder."""
    nsp: bool = True
    """Pairs of segments with next-sentence prediction, else single segments."""
    short_fraction: float = 0.1
    """Share of examples that aim at a random shorter length (0 to 1)."""
    mask_rate: float = 0.15
    """Share of tokens predicted (0 to 1): 80 % become [MASK], 10 % random, 10 % stay."""
    max_predictions: int = 20
    """Most predicted tokens of a sequence."""
    whole_word: bool = False
    """Mask all the pieces of a word together."""
    shards: int = 0
    """Byte models: strings into which the documents of an epoch are joined; 0 is the greater of 1,000 and the batch."""
    reshuffle: bool = True
    """Byte models: draw the shards anew for every epoch; false repeats those of the first."""
    label_weight: float = 0.0
    """Byte models: weight of the auxiliary objective, the squared error of `data.label` predicted from the state at the end of a document; 0 is none."""
    optim: Optim = field(default_factory=Optim)
    """Optimizer and schedule."""


@dataclass(frozen=True)
class Columns:
    """The columns (of JSON lines: the keys) of a table of one's own, where they are not called as the task expects."""

    __pydantic_config__ = _STRICT
    text: str = ""
    """`csv`: column of the text, or of the first of a pair; empty is `text`, or `text_a` where there is one."""
    text_b: str = ""
    """`csv`: column of the second text of a pair; empty is `text_b` beside `text_a`, else none."""
    label: str = ""
    """`csv`: column of the class; empty is `label`."""
    score: str = ""
    """`csv`: column of the number to predict, instead of a class; empty is `score`."""
    id: str = ""
    """`csv`: column of the row's own name, by which it is answered; empty is `id` where there is one, else the number of the row."""


@dataclass(frozen=True)
class Finetune:
    """A task the pretrained encoder is fine-tuned on after the last phase."""

    __pydantic_config__ = _STRICT
    task: Literal["docnames", "cola", "mrpc", "rte", "stsb", "sst2", "qnli", "wnli", "mnli", "qqp", "sst", "imdb", "csv", "squad"] = (
        "docnames"
    )
    """Which task; `docnames` is made from the embedded documentation, `csv` is your own table (.csv, .tsv, .jsonl), `squad` also questions of your own in its format."""
    path: str = ""
    """Folder (or file) with the task's data, in its original layout; of `csv` and `squad` also the file to train on. `$NAME` is read from the environment."""
    dev: str = ""
    """`csv`, `squad`: file to score on, where `path` is the file to train on; empty is the one in the folder, else a tenth is held out."""
    columns: Columns = field(default_factory=Columns)
    """Names of the columns of your own table."""
    epochs: float = 3.0
    """Passes over the training rows."""
    batch: int = 32
    """Rows in one optimizer step."""
    micro_batch: int = 32
    """Rows a device holds at once."""
    lr: float = 5e-5
    """Peak learning rate of AdamW."""
    warmup: float = 0.1
    """Share of the steps spent warming up (0 to 1); linear decay to 0 follows."""
    weight_decay: float = 0.01
    """Decoupled decay; biases and norm parameters have none."""
    length: int = 128
    """Longest sequence (tokens)."""
    stride: int = 128
    """SQuAD: tokens by which successive windows of a long paragraph advance."""
    max_answer: int = 30
    """SQuAD: longest answer (tokens)."""
    misplaced: float = 0.001
    """`squad`: share of answers (0 to 1) that may not stand at their `answer_start`; they are counted and not trained on. More are an error."""
    max_rows: int = 0
    """Training rows (SQuAD: questions) used at most, drawn by a hash of their texts with each label in its share, the same for every seed; 0 is all."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """One fine-tuning a seed; the median and the spread are reported."""
    baseline: bool = False
    """Also train the same network from scratch, with the same seeds."""


@dataclass(frozen=True)
class Transfer:
    """A task on which the frozen features of a pretrained byte model are judged by a logistic regression."""

    __pydantic_config__ = _STRICT
    task: Literal["sst", "imdb", "csv"] = "sst"
    """Which task; `csv` is your own table (.csv, .tsv, .jsonl)."""
    path: str = ""
    """Folder (or file) with the task's data, in its original layout. `$NAME` is read from the environment."""
    columns: Columns = field(default_factory=Columns)
    """Names of the columns of your own table."""
    features: Literal["cell", "hidden", "mean", "cell+hidden", "cell+mean", "cell+hidden+mean"] = "cell"
    """What describes a text: the last cell state, the last hidden state, the mean of the hidden states, or several side by side."""
    max_rows: int = 0
    """Training rows used at most, drawn by a hash of their texts and the seed with each label in its share; 0 is all."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of the random weights, of what is split off for validation and of the rows that are drawn; the median and the spread are reported."""


@dataclass(frozen=True)
class Train:
    """How this machine carries the run out; none of it changes what is learned beyond rounding."""

    __pydantic_config__ = _STRICT
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"] = "fp32"
    """Type of matrix products and activations; weights, optimizer, norms and loss are fp32 always. tf32 is for GPUs, a CPU computes fp32; fp16 has an automatic loss scale; fp8 is bf16 with the products of the layers in 8 bits (the extra `fp8`, compute capability 8.9)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    threads: int = 0
    """CPU threads; 0 takes every core."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, all but the products with weights, or whole layers. The same numbers in less memory, for more time."""
    offload: bool = False
    """Keep the optimizer's state in the memory of the host, and bring it to the GPU piece by piece for each step: the same numbers in less of the GPU's memory. On a CPU it is there already, and nothing changes."""
    compile: bool = False
    """Compile the model with torch.compile (pays on a GPU, needs a C++ compiler on a CPU)."""
    graphs: bool = False
    """mLSTM and LSTM on a GPU: capture the steps of a window as CUDA graphs, so that the host need not launch each; takes memory. Not yet tried on a GPU."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 100
    """Steps between held-out evaluations (0: only at the end of a phase)."""
    eval_sequences: int = 512
    """Held-out sequences of an evaluation, the same every time."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    keep: int = 3
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Steps, counted over all phases, of which one more checkpoint is kept for ever: the first (0: none)."""
    asynchronous: bool = True
    """Write checkpoints while the training goes on; it stands still only while the tensors are copied, for which the host needs memory for one more model and optimizer. Off, it waits until each is written."""
    telemetry_every: int = 0
    """Steps between measurements of every tensor's norms and trust ratio (0: never)."""
    noise_every: int = 0
    """Steps between estimates of the gradient noise scale (0: never; needs at least two micro-batches)."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """At a gradient that is not finite: stop with the weights as they were, skip the step, or go back to the newest checkpoint and pass over the data since. fp16 skips and lowers its loss scale, and does this at the lowest. A GPU is waited for at every step only with skip, rollback or fp16; with stop the gradient is looked at when a line is logged and before each checkpoint."""
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    """At a loss or a gradient norm far above those before it: say so, or do as in on_nonfinite. With ignore the lines of metrics are watched, else every step, before it is taken, and a GPU is waited for."""
    spike: float = 10.0
    """Robust deviations above the median of the last 64 steps (with on_spike=ignore: lines) that make a spike."""
    checksum_every: int = 1000
    """On many processes, steps between comparisons of the bits that all should hold alike; also before each checkpoint (0: never)."""
    on_divergence: Literal["stop", "rollback"] = "stop"
    """When a process holds other numbers than the others: stop, or go back to the newest checkpoint."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """On many processes: each has the whole model, or a part of parameters, gradients and optimizer state (FSDP2), which saves memory."""
    reduce: Literal["fp32", "bf16", "fp16"] = "fp32"
    """On many processes, the type in which gradients are added up between them: 16 bits halve what is sent, and leave 8 (bf16) or 11 (fp16) significant bits of each. fp16 needs the loss scale of train.precision=fp16. One process alone has nothing to add up."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    wandb: str = ""
    """Project of Weights & Biases that is also shown the metrics; empty is none. Without a key or the network it records offline."""


@dataclass(frozen=True)
class Run:
    """Everything a run does: data, model, phases, tasks."""

    __pydantic_config__ = _STRICT
    name: str
    """Name of the run."""
    phases: dict[str, Phase]
    """Pretraining phases, in order."""
    out: str = "runs/{name}"
    """Run folder; `{name}` is the name of the run."""
    seed: int = 0
    """Seed of initialisation, order, pairs, masks and dropout (0 to 2^32-1)."""
    data: Data = field(default_factory=Data)
    """The corpus."""
    model: Model = field(default_factory=Model)
    """The network."""
    finetune: dict[str, Finetune] = field(default_factory=dict)
    """Fine-tuning after pretraining, by name."""
    transfer: dict[str, Transfer] = field(default_factory=dict)
    """Byte models: transfer after pretraining, by name."""
    train: Train = field(default_factory=Train)
    """This machine's part."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.out.replace("{name}", self.name))

    @property
    def predicts_label(self) -> bool:
        """Whether the network of a byte model has the head of the auxiliary objective."""
        return any(phase.label_weight > 0 for phase in self.phases.values())

    @property
    def data_dir(self) -> Path:
        """The folder of the prepared shards."""
        return Path(self.data.dir.replace("{name}", self.name))
