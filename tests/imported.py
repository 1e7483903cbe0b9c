"""What the processes of :mod:`tests.processes` have imported before they begin."""

import gc
import os
from importlib import import_module
from importlib.util import find_spec

from overnight import config

MODULES = (
    "torch",
    "torch._dynamo",  # the first optimizer would import it
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.profiler._cupti_monitor",
    "overnight.cli.main",
    "overnight.cli.run",
    "overnight.corpus.pipeline",
    "overnight.engine.pretrain",
    "overnight.finetune.finetune",
    "overnight.interop.export",
    "overnight.report.page",
    "tests.distributed.parallel_worker",
    "tests.optim.sharded_worker",
)
OPTIONAL = ("distributed",)  # each scheduler and each worker of a cluster would import it

gc.disable()  # nothing that an import makes is garbage: to search it took a quarter of the time
for name in (*MODULES, *(name for name in OPTIONAL if find_spec(name))):
    import_module(name)
config.load_run("demo")  # what checks a recipe is made when the first is read
os.fsync = lambda descriptor: None  # as in the tests themselves
gc.freeze()
gc.enable()
