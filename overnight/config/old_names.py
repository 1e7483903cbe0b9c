"""The names that settings and metrics had in earlier states of the repository: a recipe or a run folder that has one is refused with its new name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PHASE = {
    "global_batch": "global_batch_size",
    "micro_batch": "micro_batch_size",
    "length": "seq_len",
    "short_fraction": "short_seq_prob",
    "mask_rate": "mlm_probability",
    "max_predictions": "max_predictions_per_seq",
    "shards": "num_document_groups",
    "batch_warmup.start": "batch_warmup.initial_batch_size",
    "optim.trust_clip": "optim.max_trust_ratio",
    "optim.adapt": "optim.trust_ratio_on",
    "optim.start": "optim.reset_moments (true or false)",
    "optim.scaling.batch": "optim.scaling.base_batch_size",
    "optim.schedule.warmup": "optim.schedule.warmup_ratio",
    "optim.schedule.hold": "optim.schedule.stable_ratio",
    "optim.schedule.total": "optim.schedule.total_steps",
    "optim.schedule.offset": "optim.schedule.step_offset",
}
_FINETUNE = {
    "batch": "global_batch_size",
    "micro_batch": "micro_batch_size",
    "warmup": "warmup_ratio",
    "length": "seq_len",
    "stride": "doc_stride",
    "max_answer": "max_answer_length",
    "max_rows": "max_train_examples",
    "misplaced": "max_misplaced_answers",
    "baseline": "random_init_seeds",
    "random_init_baseline": "random_init_seeds",
}
RENAMED: dict[str, str] = {
    "data.units": "data.tokenizer",
    "data.truncated": "data.on_truncated_file",
    "data.max_bad_lines": "data.max_invalid_lines",
    "model.width": "model.hidden_size",
    "model.layers": "model.num_layers",
    "model.heads": "model.num_heads",
    "model.ffn": "model.intermediate_size",
    "model.max_length": "model.max_position_embeddings",
    "model.embedding": "model.embedding_size",
    **{f"phases.*.{old}": f"phases.*.{new}" for old, new in _PHASE.items()},
    **{f"finetune.*.{old}": f"finetune.*.{new}" for old, new in _FINETUNE.items()},
    "transfer.*.max_rows": "linear_probe.*.max_train_examples",
    "transfer": "linear_probe",
    "train.precision": "precision",
    "train.device": "compute.device",
    "train.threads": "compute.threads",
    "train.compile": "compute.torch_compile",
    "train.graphs": "compute.cuda_graphs",
    "train.recompute": "memory.activation_checkpointing",
    "train.offload": "memory.optimizer_cpu_offload",
    "train.log_every": "logging.log_every",
    "train.eval_every": "logging.eval_every",
    "train.eval_sequences": "logging.eval_examples",
    "train.telemetry_every": "logging.tensor_norms_every",
    "train.noise_every": "logging.grad_noise_every",
    "train.tensorboard": "logging.tensorboard",
    "train.wandb": "logging.wandb_project",
    "train.checkpoint_every": "checkpoint.save_every",
    "train.keep": "checkpoint.keep_latest_k",
    "train.keep_every": "checkpoint.keep_every_n_steps",
    "train.asynchronous": "checkpoint.async_save",
    "train.on_nonfinite": "stability.on_nonfinite",
    "train.on_spike": "stability.on_spike",
    "train.spike": "stability.spike_threshold",
    "train.checksum_every": "stability.replica_check_every",
    "train.on_divergence": "stability.on_replica_mismatch",
    "train.parallel": "distributed.strategy",
    "train.reduce": "distributed.grad_reduce_dtype",
}
"""Old key to new key; `*` is any name."""
METRICS = {
    "what": "event",
    "loader_wait": "data_wait_fraction",
    "wait_share": "straggler_wait_fraction",
    "tensors": "tensor_norms",
    "tag": "config_hash",
    "held_out_documents": "validation_documents",
}
"""Old key of `metrics.jsonl` or `tasks.jsonl` to new key, whatever the kind of line."""
_VALUES = {
    ("phases.*.optim.schedule.name", "hold"): "wsd",
    ("phases.*.optim.schedule.name", "puri"): "linear, with warmup_ratio 0 and total_steps 100000",
}


def old_names(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every key and value of a recipe that has a new name: its place, and a sentence that says it."""
    yield from _walk(tree, (), ())


def _walk(node: Mapping[str, Any], path: tuple[str, ...], pattern: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, value in node.items():
        here = (*path, str(name))
        named = len(path) == 1 and path[0] in ("phases", "finetune", "transfer")
        general = (*pattern, "*" if named else str(name))
        key, known = ".".join(general), ".".join(here)
        if key == "train" and not isinstance(value, Mapping):
            yield here, f"{known}: is now the sections compute, memory, distributed, stability, checkpoint and logging"
        elif key in RENAMED:
            yield here, f"{known}: is now {_filled(RENAMED[key], here)}"
        elif isinstance(value, str) and (key, value) in _VALUES:
            yield here, f"{known} = {value!r}: is now {_VALUES[key, value]}"
        if isinstance(value, Mapping) and key != "train":
            yield from _walk(value, here, general)
        elif isinstance(value, Mapping):
            inner = list(_walk(value, here, general))
            yield from inner or [(here, f"{known}: is now the sections compute, memory, distributed, stability, checkpoint and logging")]


def _filled(new: str, here: tuple[str, ...]) -> str:
    return new.replace("*", here[1]) if len(here) > 1 else new
