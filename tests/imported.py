"""What the processes of :mod:`tests.processes` have imported before they begin."""

import gc
import os

import torch
import torch._dynamo  # the first optimizer would import it
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.profiler._cupti_monitor  # noqa: F401

import overnight.cli.main
import overnight.cli.run
import overnight.corpus.pipeline
import overnight.engine.pretrain
import overnight.finetune.finetune
import overnight.interop.export
import overnight.report.page  # noqa: F401
import tests.distributed.parallel_worker
import tests.optim.sharded_worker  # noqa: F401
from overnight import config

config.load_run("demo")  # what checks a recipe is made when the first is read
os.fsync = lambda descriptor: None  # as in the tests themselves
gc.freeze()
