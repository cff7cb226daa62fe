"""Checkpoints on the Hugging Face hub: found in its cache without a socket, or downloaded, resumed and verified."""

import errno
import hashlib
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dflash_mlx.errors import CheckpointError, ResourceError

Progress = Callable[[str, int, int], None]
"""Called with a checkpoint's name, the bytes here, and the bytes in all."""

# Nothing else of a repository is fetched: no other weight format, and no Python.
DRAFT_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json")
_TOKENIZER = "tokenizer*.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json merges.txt"
TARGET_FILES = (*DRAFT_FILES, "generation_config.json", "chat_template.*", *_TOKENIZER.split())
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_STREAMS = 4  # files downloaded side by side; one connection rarely fills a fast line


@dataclass(frozen=True, slots=True)
class File:
    """One file of a repository: its name, bytes, and blob name (the SHA-256 of a large file, else git's SHA-1)."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Remote:
    """What a repository holds for us at one commit."""

    repo: str
    commit: str
    files: tuple[File, ...]

    @property
    def folder(self) -> Path:
        """The snapshot's folder in the cache, there or not."""
        return _home(self.repo) / "snapshots" / self.commit

    def missing(self) -> tuple[File, ...]:
        """Return the files that are not in the cache at full length."""
        return tuple(file for file in self.files if _size(self.folder / file.name) != file.size)


def is_id(name: str) -> bool:
    """Tell whether `name` has the form owner/name of a hub repository."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*", name) is not None


def cache_folder() -> Path:
    """Return the hub's cache folder; HF_HOME and HF_HUB_CACHE move it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached(repo: str, revision: str | None) -> Path | None:
    """Return the cached snapshot that holds config.json, or None; the network is not touched."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def listing(repo: str, revision: str | None, patterns: tuple[str, ...]) -> Remote:
    """Ask the hub which files a checkpoint has; raise CheckpointError or ResourceError in one line."""
    from huggingface_hub import HfApi

    with _one_line(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = tuple(
        File(entry.rfilename, entry.size or 0, entry.lfs.sha256 if entry.lfs else str(entry.blob_id))
        for entry in info.siblings or ()
        if any(fnmatch(entry.rfilename, pattern) for pattern in patterns) and "/" not in entry.rfilename
    )
    remote = Remote(repo, str(info.sha), files)
    if not any(file.name.endswith(".safetensors") for file in files):
        raise CheckpointError(f"{repo} has no model*.safetensors on the hub; use a repository with safetensors weights")
    if revision != remote.commit:
        _write_reference(remote, revision or "main")
    return remote


def tensor_offsets(remote: Remote) -> dict[str, tuple[int, int]]:
    """Read where every tensor starts and ends from the headers of the weight files on the hub."""
    from huggingface_hub import HfApi

    with _one_line(remote.repo, remote.commit):
        read = partial(HfApi().parse_safetensors_file_metadata, remote.repo, revision=remote.commit)
        tensors = [read(file.name).tensors for file in remote.files if file.name.endswith(".safetensors")]
    return {name: info.data_offsets for part in tensors for name, info in part.items()}


def download(remote: Remote, files: tuple[File, ...], progress: Progress | None = None) -> Path:
    """Fetch `files` into the cache, a cut download from where it stopped, and return the snapshot's folder."""
    meter = _Meter(remote.repo, sum(file.size for file in files), progress)
    with _one_line(remote.repo, remote.commit), ThreadPoolExecutor(_STREAMS) as pool:
        jobs = [pool.submit(_fetch, remote, file, meter) for file in sorted(files, key=lambda file: file.size)]
        try:
            for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                job.result()
        finally:  # an interrupt or a fault ends the other streams at their next piece
            meter.stopped.set()
            pool.shutdown(cancel_futures=True)
    return remote.folder


class _Meter:
    """Adds up the bytes of all streams and reports them."""

    def __init__(self, name: str, total: int, progress: Progress | None) -> None:
        self.name, self.total, self.done, self.progress = name, total, 0, progress
        self.lock, self.stopped = threading.Lock(), threading.Event()

    def add(self, size: int) -> None:
        with self.lock:
            self.done += size
            if self.progress:
                self.progress(self.name, self.done, self.total)


class _Sink(io.FileIO):
    """A partial file that counts what is appended to it."""

    def __init__(self, path: Path, meter: _Meter) -> None:
        super().__init__(path, "ab")
        self.meter = meter
        try:
            flock(self, LOCK_EX | LOCK_NB)  # two processes must not append to one file
        except BlockingIOError:
            self.close()
            raise
        meter.add(self.tell())

    def write(self, data: Any) -> int:
        if self.meter.stopped.is_set():
            raise InterruptedError("the download was stopped")
        size = super().write(data)
        self.meter.add(size)
        return size

    def truncate(self, size: int | None = None) -> int:
        kept = self.tell() if size is None else size
        self.meter.add(kept - os.fstat(self.fileno()).st_size)
        return super().truncate(kept)


class _Silent(nullcontext["_Silent"]):
    """Stands in for the hub's own progress bar, which would draw on the caller's screen."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(self)

    def update(self, _: float) -> None: ...


def _fetch(remote: Remote, file: File, meter: _Meter) -> None:
    """Bring one file to its place: partial blob, verified blob, then the snapshot's link to it."""
    from huggingface_hub import HfApi
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    blob = _home(remote.repo) / "blobs" / file.etag
    piece = blob.with_name(f"{file.etag}.incomplete")
    blob.parent.mkdir(parents=True, exist_ok=True)
    if _size(blob) not in (None, file.size):  # a cut blob goes on as a partial one
        blob.replace(piece)
    if blob.exists():
        meter.add(file.size)
    else:
        url = f"{HfApi().endpoint}/{remote.repo}/resolve/{remote.commit}/{quote(file.name)}"
        with _Sink(piece, meter) as sink:
            if sink.tell() > file.size:
                sink.truncate(sink.seek(0))
            at, headers = sink.tell(), build_hf_headers()
            http_get(url, sink, resume_size=at, headers=headers, expected_size=file.size, tqdm_class=_Silent)
            _verify(remote, file, piece)
            piece.replace(blob)
    link = remote.folder / file.name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


def _verify(remote: Remote, file: File, piece: Path) -> None:
    """Compare a large file with its SHA-256, because a resumed one was put together from pieces."""
    if len(file.etag) != 64:
        return
    with piece.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    if digest != file.etag:
        piece.unlink()
        raise ResourceError(f"{remote.repo}: {file.name} arrived damaged (SHA-256 {digest[:12]}…); download it again")


def _home(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _write_reference(remote: Remote, revision: str) -> None:
    """Note which commit a branch pointed to, so that the next start finds it without the network."""
    with _one_line(remote.repo, revision):
        reference = _home(remote.repo) / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(remote.commit, encoding="utf-8")


@contextmanager
def _one_line(repo: str, revision: str | None) -> Iterator[None]:
    """Turn whatever the hub, the network or the disk raise into one line that says what to do."""
    from huggingface_hub import errors

    library: type[Exception] = errors.HfHubHTTPError.__mro__[1]  # the HTTP library's own error; which one it is changes
    try:
        yield
    except (OSError, library, RuntimeError, errors.SafetensorsParsingError) as error:
        raise _explained(repo, revision, error) from error


def _explained(repo: str, revision: str | None, error: Exception) -> ResourceError | CheckpointError:
    from huggingface_hub import errors

    login = "`hf auth login`"
    if isinstance(error, errors.GatedRepoError):
        return ResourceError(f"{repo} asks for a login: accept its terms on the hub, then run {login}")
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{repo} has no revision {revision!r} on the hub")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(f"{repo} is not on the hub, or needs a login ({login})")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ResourceError(f"{repo} is not whole in {cache_folder()}, and HF_HUB_OFFLINE forbids to fetch it")
    if isinstance(error, BlockingIOError):
        return ResourceError(f"{repo} is being downloaded by another process; wait for it, then try again")
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK_ERRORS):
        return ResourceError(f"{repo} cannot be written to {cache_folder()} ({error.strerror}); set HF_HOME elsewhere")
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return ResourceError(f"{repo} could not be downloaded ({reason}); check the network, a new try goes on from here")
