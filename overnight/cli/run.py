"""`overnight run`: every stage in order, each of which knows what it has done already."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from overnight.byte_lm.logistic import check_installed
from overnight.config import BertRun, ByteRun, Run, environment_path
from overnight.console import Line
from overnight.corpus.named_sources import named_paths
from overnight.corpus.pipeline import prepare
from overnight.corpus.places import is_remote
from overnight.corpus.vocabulary import initial_tokens
from overnight.display import duration, plural, width_of
from overnight.errors import ConfigError
from overnight.report.data_page import refresh_data_report


def run_all(run: Run, extend: bool) -> None:
    """Prepare, pretrain, fine-tune or probe, evaluate, export and report a run; again after an interruption, it resumes where it was.

    Args:
        extend: the run folder may hold a shorter run, which this one resumes from; what followed its pretraining is done again.

    Raises:
        ConfigError: before anything is done, when the data of a task or BLiMP is not there, or the run folder cannot be written; before pretraining, when the budget leaves it no time.
        UserError: where a probe of a new run lacks what it needs, before anything is done; from the stage that could not continue.
    """
    finetunes = run.finetune if isinstance(run, BertRun) else {}
    probes = run.linear_probe if isinstance(run, ByteRun) else {}
    for kind, specs in (("finetune", finetunes), ("linear_probe", probes)):
        for name, spec in specs.items():
            for key, what in (("path", "folder or file with the task's data"), ("dev", "file to score on")):
                if (path := getattr(spec, key, "")) and not environment_path(path, f"{kind}.{name}.{key}").exists():
                    raise ConfigError(f"{kind}.{name}.{key} = {path!r}: does not exist; name the {what}")
    if probes and not (run.run_dir / "run.yaml").exists():
        check_installed()
    blimp = run.evaluation.blimp if isinstance(run, BertRun) else ""
    if blimp and not environment_path(blimp, "evaluation.blimp").exists():
        raise ConfigError(f"evaluation.blimp = {blimp!r}: does not exist; name blimp.tar.xz or its folder, or leave it out")
    from overnight.checkpoint.run_corpus import with_data
    from overnight.checkpoint.run_identity import check_folder, claim_folder
    from overnight.engine.budget_extension import extend_budget
    from overnight.engine.budget_record import begin_command, begin_record, close_record, read_record, set_by_clock
    from overnight.engine.pretrain import pretrain
    from overnight.engine.size_record import chosen_before
    from overnight.engine.sizing import settle_sizes, settle_vocabulary
    from overnight.run_dir.atomic import check_writable
    from overnight.run_dir.lock import run_lock

    check_writable(run.run_dir, "out")
    line, start, recipe = Line(), time.perf_counter(), run
    check_folder(chosen_before(run), extend)
    resumed = (run.run_dir / "run.yaml").exists()
    if extend and run.budget and resumed:
        with run_lock(run.run_dir):
            extend_budget(chosen_before(run), line.print)
            claim_folder(chosen_before(run), extend)
    clock = begin_command(run, line.print) if run.budget else None
    run = settle_vocabulary(run, line.print)
    tasks = [*(f"fine-tune {name}" for name in finetunes), *(f"probe on {name}" for name in probes)]
    tasks += ["evaluate"] * isinstance(run, BertRun)
    stages = 4 + len(tasks)
    line.print(f"run {run.name}: {plural(stages, 'stage')}: {', '.join(['prepare', 'pretrain', *tasks, 'export', 'report'])}")

    def stage(number: int, text: str) -> None:
        line.print(f"[{number}/{stages}] {text}  (after {duration(time.perf_counter() - start)})")

    stage(1, f"prepare {', '.join(path for _, path in named_paths(run.data))}")
    _prepare(run, with_data(run).data_dir, line)
    if clock:  # preparation may have taken hours, in which the time of day was set
        set_by_clock(run, begin_record(run), clock, line.print)
    run = settle_sizes(recipe, line.print, seconds_after)
    if clock:
        set_by_clock(run, begin_record(run), clock, line.print)
        estimate_the_rest(run, line)
    stage(2, f"pretrain {', '.join(run.phases)}")
    # More time was given above, where it began: not again, should it be over by now.
    pretrain(run, line, extend and not run.budget)
    from overnight.byte_lm.linear_probe import linear_probe
    from overnight.evaluation.evaluate import evaluate_run
    from overnight.finetune.finetune import finetune
    from overnight.interop.byte_models import export_byte_model
    from overnight.interop.export import export_run

    claim_folder(run)
    works: list[Callable[[], object]]
    if isinstance(run, BertRun):
        works = [*(partial(finetune, run, name, line) for name in run.finetune), partial(evaluate_run, run, line)]
    else:
        assert isinstance(run, ByteRun)
        works = [partial(linear_probe, run, name, line) for name in run.linear_probe]
    for number, (text, work) in enumerate(zip(tasks, works, strict=True), 3):
        stage(number, text)
        work()
    stage(stages - 1, f"export to {run.run_dir / 'export'}")
    if isinstance(run, BertRun):
        export_run(run, run.run_dir / "export")
    else:
        export_byte_model(run, run.run_dir / "export")
    stage(stages, "report")
    from overnight.finetune.samples import write_samples
    from overnight.report.page import refresh_report
    from overnight.report.summary import summary_text

    write_samples(with_data(run))
    line.print(summary_text(run.run_dir, width_of(sys.stdout)))
    line.print(refresh_report(run.run_dir))
    took = "this command took" if resumed else "done in"
    line.print(f"{took} {duration(time.perf_counter() - start)}; model in {run.run_dir / 'export'}")
    # What `overnight pretrain` has closed did not include what followed here.
    if run.budget and (record := read_record(run)) and (record.after or record.done is None):
        line.print(close_record(run))


def _prepare(run: Run, folder: Path, line: Line) -> None:
    """Prepare the folder of the data of a run; of data in storage a copy is there by now, and pretraining compares its settings with the recipe."""
    if is_remote(run.data.dir):
        line.print(f"prepare: {run.data.dir} is used as it was prepared; the run reads its copy {folder}")
        return
    prepare(run.data, folder, log=line.print, given=initial_tokens(run), leave_out=[run.run_dir])
    if said := refresh_data_report(folder):
        line.print(said)


def seconds_after(run: Run) -> float:
    """Return how long all that follows pretraining will take (s)."""
    from overnight.cli.time_plan import seconds_after_pretraining

    return sum(seconds_after_pretraining(run).values())


def estimate_the_rest(run: Run, line: Line) -> None:
    """Write into the record of a run with a budget how long each stage after pretraining will take; once training has begun, only where there is no estimate.

    Raises:
        ConfigError: when that leaves no time for pretraining.
        DataError: when the data of a task cannot be used.
    """
    from overnight.cli.time_plan import seconds_after_pretraining
    from overnight.engine.budget_record import begin_record, check_budget, write_record

    record = begin_record(run)
    if not record.decisions or (record.after is None and record.trained is None):
        after = seconds_after_pretraining(run)
        write_record(run, dataclasses.replace(record, after={name: round(seconds, 1) for name, seconds in after.items()}))
        said = ", ".join(f"{name} {duration(seconds)}" for name, seconds in after.items())
        line.print(f"budget {run.budget}: what follows pretraining is estimated at {said}")
    check_budget(run)
