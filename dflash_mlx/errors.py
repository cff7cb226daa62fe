"""The ways dflash-mlx refuses: each message says what, which value, and what to do."""


class DFlashError(Exception):
    """Base of every refusal; the CLI turns it into one line and exit code 1."""


class OptionError(DFlashError, ValueError):
    """An option has a value that can never work."""


class PromptError(DFlashError, ValueError):
    """A prompt is empty, malformed, or longer than the model's context."""


class CheckpointError(DFlashError):
    """A checkpoint is missing, incomplete, damaged, or of an unsupported kind."""


class PairError(DFlashError):
    """A target and a draft do not belong together."""


class ResourceError(DFlashError):
    """The machine lacks the memory, the disk or the network for what was asked."""
