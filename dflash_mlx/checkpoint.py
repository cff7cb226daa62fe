"""One checkpoint, wherever it lies: a local folder, the hub's cache, or the hub itself."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_mlx import folder as folders
from dflash_mlx import hub
from dflash_mlx.errors import CheckpointError, OptionError, ResourceError
from dflash_mlx.models.presets import package_folder

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A target or a draft whose config.json is on this machine; `remote` is set while other files are not."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    draft: bool
    remote: hub.Remote | None = None

    @property
    def commit(self) -> str | None:
        """The hub commit it comes from, or None for a plain folder."""
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    @property
    def missing_bytes(self) -> int:
        """Bytes still to be downloaded."""
        return sum(file.size for file in self.remote.missing()) if self.remote else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that will be loaded; before a download the hub is asked for the files' headers."""
        if self.remote:
            return folders.loaded_bytes(hub.tensor_offsets(self.remote))
        return folders.weight_bytes(self.folder, self.name)

    def fetch(self, progress: hub.Progress | None = None) -> "Checkpoint":
        """Download what is missing and return the whole checkpoint; raise CheckpointError if it is still not whole."""
        if self.remote:
            hub.download(self.remote, self.remote.missing(), progress)
        require_whole(self.folder, self.name, self.draft)
        return replace(self, remote=None)


def find(name: str, revision: str | None, *, draft: bool, embedded: bool = False) -> Checkpoint:
    """Locate a checkpoint and read its config.json; only an incomplete hub checkpoint touches the network.

    Raises CheckpointError for a folder that is missing, damaged or incomplete, ResourceError for a hub out of reach.
    """
    if embedded:
        return _here(package_folder(name), name, draft)
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise OptionError(f"{name} is a local folder; a revision ({revision}) goes with a hub id only")
        return _here(path, name, draft)
    if not hub.is_id(name):
        raise CheckpointError(f"{name}: no such folder (and no hub id, which reads owner/name)")
    return _on_hub(name, revision, draft)


def require_whole(folder: Path, name: str, draft: bool) -> None:
    """Raise CheckpointError, naming the file, unless config, weights and tokenizer are all there and uncut."""
    folders.read_config(folder, name)
    folders.weight_bytes(folder, name)
    if draft:
        return
    if not any((folder / file).is_file() for file in _TOKENIZERS):
        raise CheckpointError(f"{name}: {folder} has no tokenizer ({' or '.join(_TOKENIZERS)})")
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "auto_map" in folders.read_json(settings, name):
        raise CheckpointError(f"{name} brings its own Python code for the tokenizer, which is never run")


def _here(folder: Path, name: str, draft: bool, remote: hub.Remote | None = None) -> Checkpoint:
    return Checkpoint(name, folder, folders.read_config(folder, name), draft, remote)


def _on_hub(name: str, revision: str | None, draft: bool) -> Checkpoint:
    found, fault = hub.cached(name, revision), None
    if found is not None:
        try:
            require_whole(found, name, draft)
            return _here(found, name, draft)
        except CheckpointError as error:
            fault = error
    try:
        remote = hub.listing(name, revision, hub.DRAFT_FILES if draft else hub.TARGET_FILES)
        small = ("config.json", "generation_config.json")
        hub.download(remote, tuple(file for file in remote.missing() if file.name in small))
    except ResourceError as error:
        raise ResourceError(f"{fault}; {error}" if fault else str(error)) from error
    return _here(remote.folder, name, draft, remote)
