"""What a run does, as one frozen value: read, checked and written here. Nothing in it needs torch."""

from overnight.config.load import build_run, describe, differences, identity, load_run, read_recipe, recipes, run_yaml, to_tree
from overnight.config.schema import BatchWarmup, Columns, Data, Finetune, Model, Optim, Phase, Run, Scaling, Schedule, Train, Transfer
from overnight.config.validate import environment_path, validate_run

__all__ = [
    "BatchWarmup",
    "Columns",
    "Data",
    "Finetune",
    "Model",
    "Optim",
    "Phase",
    "Run",
    "Scaling",
    "Schedule",
    "Train",
    "Transfer",
    "build_run",
    "describe",
    "differences",
    "environment_path",
    "identity",
    "load_run",
    "read_recipe",
    "recipes",
    "run_yaml",
    "to_tree",
    "validate_run",
]
