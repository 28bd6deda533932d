"""What a run goes on from, and what may be different when it does."""

from asyncmaml.checkpoint import Checkpoint
from asyncmaml.config import TrainConfig, options
from asyncmaml.errors import ConfigurationError
from asyncmaml.training.run_folder import RunFolder

# What a resumed run may change: none of it has a part in what is drawn or learned.
MAY_CHANGE = (
    "iterations",
    "num_workers",
    "envs_per_worker",
    "step_timeout",
    "device",
    "on_task_error",
    "evaluation_interval",
    "evaluation_tasks",
    "evaluation_episodes",
    "checkpoint_interval",
)


def found_checkpoint(
    folder: RunFolder, config: TrainConfig | None, *, resume: bool
) -> Checkpoint | None:
    """Return the checkpoint to go on from, if there is one.

    Raises:
        ConfigurationError: There is one and `resume` is false, or it is of another training.
    """
    if not folder.checkpoint.exists():
        return None
    checkpoint = folder.load_checkpoint("cpu" if config is None else config.device)
    if not resume:
        message = (
            f"{folder.path} holds a run already, of {checkpoint.iterations} iterations; resume it, "
            "or name another folder"
        )
        raise ConfigurationError(message)
    for option in options() if config is not None else ():
        before, now = getattr(checkpoint.config, option.name), getattr(config, option.name)
        if before != now and option.name not in MAY_CHANGE:
            message = (
                f"{folder.path} was trained with {option.name}={before!r} and cannot go on with "
                f"{now!r}; train into another folder. A resumed run may change "
                + ", ".join(MAY_CHANGE)
            )
            raise ConfigurationError(message)
    return checkpoint


def config_to_train(config: TrainConfig | None, checkpoint: Checkpoint | None) -> TrainConfig:
    """Return the configuration that was given, or the checkpoint's.

    Raises:
        ConfigurationError: There is neither.
    """
    if config is not None:
        return config
    if checkpoint is None:
        message = "train() was given neither a config nor an output that holds a run to resume"
        raise ConfigurationError(message)
    return checkpoint.config
