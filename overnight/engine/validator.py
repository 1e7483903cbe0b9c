"""The validation of a phase: the same batches every time."""

from __future__ import annotations

from overnight.batches.loader import Samples
from overnight.batches.streams import Streams
from overnight.display import measures, share
from overnight.engine.context import PhaseContext
from overnight.engine.loop import LoopConfig, StepResult, evaluate
from overnight.engine.memory import is_out_of_memory
from overnight.engine.metrics_logger import MetricsLogger
from overnight.engine.workload import bits_per_byte, compiles_layers


class Validator:
    """Evaluates the network of a phase on validation examples.

    Args:
        context: what all phases share.
        logger: takes the scores.
        samples: of the validation split.
        settings: of the loop.
    """

    def __init__(self, context: PhaseContext, logger: MetricsLogger, samples: Samples | Streams, settings: LoopConfig) -> None:
        self.context, self.logger, self.samples, self.settings = context, logger, samples, settings

    def set_micro_batch_size(self, size: int) -> None:
        """Evaluate in micro-batches of a size from now on."""
        self.samples.set_micro_batch_size(size)
        self.steps = self.samples.validation_steps(self.context.run.logging.eval_examples)

    def warm_up(self) -> None:
        """Take two steps of the validation for nothing: on a GPU, and where layers are compiled, the first one takes much longer than all others."""
        context, device = self.context, self.settings.device
        if self.steps and (device.type == "cuda" or compiles_layers(context.run, device)):
            steps = [*self.steps[:1], *self.steps[-1:]]  # the longest and the shortest, which may be padded otherwise
            try:
                evaluate(context.workload.model, context.objective, steps, self.settings, context.workload.validation_carry())
            except (MemoryError, RuntimeError) as error:
                # In one process the first step of the training finds out what fits; of many, none may leave out what the others wait for.
                if self.settings.world.size > 1 or not is_out_of_memory(error):
                    raise

    def evaluate(self, done: StepResult) -> None:
        """Write and print the losses and accuracies after a step."""
        context, logger = self.context, self.logger
        scores = evaluate(context.workload.model, context.objective, self.steps, self.settings, context.workload.validation_carry())
        scores |= bits_per_byte(scores)
        logger.write("eval", done.step, **scores)
        logger.known["validation accuracy"] = next(
            (share(scores[name]) for name in ("mlm_accuracy", "clm_accuracy", "byte_accuracy") if name in scores), ""
        )
        context.line.print(f"{logger.name} {done.step:,}/{logger.phase.steps:,}  validation: {measures(scores)}")
        logger.print_noise(done.sequences)
        logger.speed.pause()
