"""Published settings of fine-tuning, as overrides of a task: what a comparison with a paper begins from."""

from __future__ import annotations

from overnight.errors import ConfigError

# Devlin et al. 2018: sections 4.1 and 4.2, and for other tasks the grid of appendix A.3.
_BERT_GLUE = {"epochs": "3", "global_batch_size": "32", "search.lr": "[5e-5,4e-5,3e-5,2e-5]", "select_on": "dev"}
_BERT_SQUAD = {"epochs": "3", "global_batch_size": "32", "lr": "5e-5", "seq_len": "384", "doc_stride": "128"}
_BERT_OTHER = {"search.lr": "[5e-5,3e-5,2e-5]", "search.epochs": "[2,3,4]", "search.global_batch_size": "[16,32]"}
# Liu et al. 2019, table 10; GLUE with early stopping on dev.
_ROBERTA_GLUE = {
    "epochs": "10",
    "search.lr": "[1e-5,2e-5,3e-5]",
    "search.global_batch_size": "[16,32]",
    "weight_decay": "0.1",
    "warmup_ratio": "0.06",
    "keep_best": "true",
    "select_on": "dev",
}
_ROBERTA_SQUAD = {
    "epochs": "2",
    "global_batch_size": "48",
    "micro_batch_size": "24",
    "lr": "1.5e-5",
    "warmup_ratio": "0.06",
    "seq_len": "512",
    "doc_stride": "128",
}
# Clark et al. 2020, appendix B: learning rate and decay from layer to layer of the sizes up to a width.
_ELECTRA_SIZES = ((512, "3e-4", "0.8"), (768, "1e-4", "0.8"), (1 << 30, "5e-5", "0.9"))
_ELECTRA_EPOCHS = {"rte": "10", "stsb": "10", "squad": "2"}

NAMES = ("bert", "roberta", "electra")
"""Whose settings there are."""
# Tasks that are not of GLUE: what chooses is not what is reported.
_OTHERS = ("csv", "tokens", "imdb", "sst", "docnames")


def published_settings(name: str, task: str, hidden_size: int) -> dict[str, str]:
    """Return the settings that a paper fine-tuned with, as far as there are such settings here.

    Args:
        name: one of :data:`NAMES`.
        task: a kind of task, such as `mnli`.
        hidden_size: width of the network.

    Returns:
        text of values by dotted key.

    Raises:
        ConfigError: no such name.
    """
    if name not in NAMES:
        raise ConfigError(f"published = {name!r}: is not one of {', '.join(NAMES)}")
    if name == "electra":
        rate, decay = next((rate, decay) for width, rate, decay in _ELECTRA_SIZES if hidden_size <= width)
        found = {
            "epochs": _ELECTRA_EPOCHS.get(task, "3"),
            "global_batch_size": "32",
            "lr": rate,
            "layer_lr_decay": decay,
            "weight_decay": "0",
        }
        return {**found, **({"seq_len": "512", "doc_stride": "128"} if task == "squad" else {})}
    if task == "squad":
        return dict(_BERT_SQUAD if name == "bert" else _ROBERTA_SQUAD)
    if task in _OTHERS:
        return dict(_BERT_OTHER if name == "bert" else {**_ROBERTA_GLUE, "select_on": "train"})
    return dict(_BERT_GLUE if name == "bert" else _ROBERTA_GLUE)
