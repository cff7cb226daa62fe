"""The hub, played by a local server: what is fetched, resumed, verified, found again offline, and how it can fail."""

import hashlib
import json
import re
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from dflash_mlx import fit, hub
from dflash_mlx.catalogue import catalogue, pull
from dflash_mlx.errors import CheckpointError, ResourceError
from dflash_mlx.loading import load

DATA = Path(__file__).parent / "data" / "checkpoints"
TARGET, DRAFT = "owner/target", "owner/draft"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories as {file: bytes}; counts requests, and cuts or refuses where a test says so."""

    def __init__(self):
        self.repos, self.requests, self.ranges = {}, [], []
        self.fault, self.cut = None, {}
        hub_self = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                hub_self.answer(self, body=False)

            def do_GET(self):
                hub_self.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a client that goes away in the middle is part of the play
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, repo, folder, **extra):
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.repos[repo] = files | extra

    def answer(self, request, body):
        self.requests.append(request.path)
        if self.fault:
            code, header = self.fault
            return self.send(request, code, {"X-Error-Code": header, "X-Error-Message": header}, b"", body)
        if found := re.match(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^/?]+))?", request.path):
            return self.describe(request, *found.groups(), body)
        repo, name = re.match(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", request.path).groups()
        self.send_file(request, name, self.repos[repo][name], body)

    def describe(self, request, repo, revision, body):
        if repo not in self.repos:
            return self.send(request, 404, {"X-Error-Code": "RepoNotFound"}, b"{}", body)
        if revision not in (None, "main", COMMIT):
            return self.send(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"{}", body)
        siblings = []
        for name, data in self.repos[repo].items():
            digest = hashlib.sha256(data).hexdigest()
            lfs = {"lfs": {"sha256": digest, "size": len(data), "pointerSize": 130}} if "safetensors" in name else {}
            siblings.append({"rfilename": name, "size": len(data), "blobId": digest[:40]} | lfs)
        text = json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False})
        self.send(request, 200, {"Content-Type": "application/json"}, text.encode(), body)

    def send_file(self, request, name, data, body):
        asked = request.headers.get("Range")
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        code, part = 200, data
        if asked:
            self.ranges.append((name, asked))
            start, end = re.match(r"bytes=(\d+)-(\d*)", asked).groups()
            part = data[int(start) : int(end) + 1 if end else None]
            code = 206
            headers["Content-Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
        self.send(request, code, headers, part, body, self.cut.pop(name, None) if body and not asked else None)

    def send(self, request, code, headers, data, body, cut=None):
        request.send_response(code)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if body:
            request.wfile.write(data[:cut])
        if cut is not None:
            request.close_connection = True


@pytest.fixture
def cache(tmp_path, monkeypatch):
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    return tmp_path / "cache"


@pytest.fixture
def fake(cache, monkeypatch):
    constants, made = huggingface_hub.constants, FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    noise = {"README.md": b"#", "evil.py": b"1/0", "pytorch_model.bin": b"0" * 10, "flax_model.msgpack": b"0"}
    made.add(TARGET, DATA / "t-hybrid-fp32", **noise)
    made.add(DRAFT, DATA / "h-d2-slide", **noise)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def no_sockets(monkeypatch):
    def block():
        def refuse(*_, **__):
            raise AssertionError("a socket was opened")

        for name in ("socket", "create_connection", "getaddrinfo"):
            monkeypatch.setattr(socket, name, refuse)

    return block


def refusal(kind, work):
    with pytest.raises(kind) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def blobs(cache, repo):
    return cache / f"models--{repo.replace('/', '--')}" / "blobs"


def test_a_pair_is_fetched_with_progress_and_loads_again_without_a_socket(fake, cache, no_sockets):
    seen = []
    pair = load(model=TARGET, draft=DRAFT, progress=lambda *event: seen.append(event))
    assert (pair.model_id, pair.draft_id, pair.revision) == (TARGET, DRAFT, COMMIT)
    for repo, folder in ((TARGET, "t-hybrid-fp32"), (DRAFT, "h-d2-slide")):
        counts = [(done, total) for name, done, total in seen if name == repo]
        assert counts == sorted(counts) and counts[-1][0] == counts[-1][1]
        assert counts[-1][1] >= (DATA / folder / "model.safetensors").stat().st_size
    no_sockets()
    again = load(model=TARGET, draft=DRAFT)
    assert again.revision == COMMIT and load(model=TARGET, revision=COMMIT, speculate=False).revision == COMMIT


def test_only_what_is_needed_is_fetched_and_lies_as_the_hub_lays_it(fake, cache):
    pull(model=TARGET, draft=DRAFT)
    target, draft = (huggingface_hub.snapshot_download(repo, local_files_only=True) for repo in (TARGET, DRAFT))
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {file.name for file in Path(target).iterdir()} == names
    assert {file.name for file in Path(draft).iterdir()} == {"config.json", "model.safetensors"}
    assert not any("evil" in path or ".bin" in path for path in fake.requests)
    assert not list(cache.rglob("*.incomplete"))


def test_a_wrong_pair_is_refused_before_any_weight_is_fetched(fake):
    fake.repos[DRAFT]["config.json"] = fake.repos[DRAFT]["config.json"].replace(
        b'"vocab_size": 512', b'"vocab_size": 600'
    )
    assert "vocabulary 600 against 512" in refusal(Exception, lambda: load(model=TARGET, draft=DRAFT))
    assert not any("safetensors" in path for path in fake.requests)


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_too_little_memory_or_disk_is_refused_before_any_weight_is_fetched(fake, cache, monkeypatch, what):
    if what == "memory":
        monkeypatch.setattr(fit, "memory", lambda: fit.Memory(10**9, 10**6, "a test's rule"))
    else:
        monkeypatch.setattr(fit, "free_bytes", lambda _: 10**9 + 10**6)
    message = refusal(ResourceError, lambda: load(model=TARGET, draft=DRAFT))
    assert ("target 2.1 MB" if what == "memory" else "of disk plus a reserve of 1.0 GB") in message
    assert not list(cache.rglob("model.safetensors"))


class Interrupt(KeyboardInterrupt):
    pass


def test_an_interrupted_download_goes_on_where_it_stopped(fake, cache):
    data = fake.repos[TARGET]["model.safetensors"]
    digest = hashlib.sha256(data).hexdigest()

    def stop(name, done, total):
        if done > total // 2:
            raise Interrupt

    with pytest.raises(Interrupt):
        pull(model=TARGET, progress=stop)
    kept = (blobs(cache, TARGET) / f"{digest}.incomplete").stat().st_size
    assert len(data) // 3 < kept < len(data)
    fake.ranges.clear()
    seen = []
    pull(model=TARGET, progress=lambda name, done, total: seen.append((done, total)))
    assert [asked for name, asked in fake.ranges if name == "model.safetensors"] == [f"bytes={kept}-"]
    assert seen[-1][0] == seen[-1][1], "what was already here counts as done"
    assert (blobs(cache, TARGET) / digest).read_bytes() == data


def test_a_dropped_connection_is_picked_up_within_the_download(fake, cache, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    fake.cut["model.safetensors"] = 350_000
    pull(model=TARGET)
    assert ("model.safetensors", "bytes=300000-") in fake.ranges
    assert load(model=TARGET).revision == COMMIT


def test_a_partial_file_that_does_not_fit_is_refused_and_removed(fake, cache):
    data = fake.repos[TARGET]["model.safetensors"]
    piece = blobs(cache, TARGET) / f"{hashlib.sha256(data).hexdigest()}.incomplete"
    piece.parent.mkdir(parents=True)
    piece.write_bytes(b"x" * 1000)
    assert "arrived damaged" in refusal(ResourceError, lambda: pull(model=TARGET))
    assert not piece.exists()
    pull(model=TARGET)


def test_a_cut_file_in_the_cache_is_completed(fake, cache):
    pull(model=TARGET)
    blob = next(path for path in blobs(cache, TARGET).iterdir() if path.stat().st_size > 1_000_000)
    data = blob.read_bytes()
    blob.write_bytes(data[:-50])
    fake.ranges.clear()
    load(model=TARGET)
    assert fake.ranges[-1] == ("model.safetensors", f"bytes={len(data) - 50}-")
    assert blob.read_bytes() == data


def test_an_incomplete_checkpoint_out_of_reach_names_both_faults(fake, cache):
    pull(model=TARGET)
    (cache / "models--owner--target" / "snapshots" / COMMIT / "tokenizer.json").unlink()
    fake.fault = (503, "Down")
    message = refusal(ResourceError, lambda: load(model=TARGET))
    assert "has no tokenizer" in message and "could not be downloaded" in message


@pytest.mark.parametrize(
    "fault, kind, message",
    [
        ((404, "RepoNotFound"), CheckpointError, "owner/target is not on the hub"),
        ((404, "RevisionNotFound"), CheckpointError, "owner/target has no revision 'v9'"),
        ((403, "GatedRepo"), ResourceError, "asks for a login"),
        ((500, ""), ResourceError, "could not be downloaded"),
    ],
)
def test_what_the_hub_refuses_is_one_line(fake, fault, kind, message):
    fake.fault = fault
    assert message in refusal(kind, lambda: load(model=TARGET, revision="v9"))


def test_a_repository_without_safetensors_is_refused(fake):
    del fake.repos[TARGET]["model.safetensors"]
    assert "no model*.safetensors" in refusal(CheckpointError, lambda: load(model=TARGET))


def test_no_network_is_one_line(cache, monkeypatch):
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    message = refusal(ResourceError, lambda: load(model=TARGET, draft=DRAFT))
    assert message.startswith(f"{TARGET} could not be downloaded (") and "check the network" in message


def test_offline_mode_is_one_line(cache, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids" in refusal(ResourceError, lambda: load(model=TARGET))


def test_an_unwritable_cache_is_one_line(fake, cache):
    cache.write_text("a file where a folder should be")
    assert f"cannot be written to {cache}" in refusal(ResourceError, lambda: load(model=TARGET))


def test_a_second_download_of_the_same_file_is_refused(fake, cache):
    data = fake.repos[TARGET]["config.json"]
    piece = blobs(cache, TARGET) / f"{hashlib.sha256(data).hexdigest()[:40]}.incomplete"
    piece.parent.mkdir(parents=True)
    with hub._Sink(piece, hub._Meter(TARGET, 0, None)):
        assert "by another process" in refusal(ResourceError, lambda: load(model=TARGET))


def test_the_catalogue_sees_what_is_cached_and_touches_no_network(fake, cache, no_sockets):
    flagship = next(status for status in catalogue() if status.preset.name == "flagship")
    assert flagship.target.folder is None and not flagship.ready and flagship.need_bytes == 16_679_602_128
    preset = flagship.preset
    home = cache / f"models--{preset.model.replace('/', '--')}" / "snapshots" / preset.revision
    home.parent.mkdir(parents=True)
    shutil.copytree(DATA / "t-hybrid-fp32", home)
    no_sockets()
    status = next(status for status in catalogue() if status.preset.name == "flagship")
    assert status.target.whole and status.target.folder == home and not status.ready
    assert status.target.disk_bytes == sum(file.stat().st_size for file in home.iterdir())
    (home / "model.safetensors").write_bytes(b"cut")
    status = next(status for status in catalogue() if status.preset.name == "flagship")
    assert not status.target.whole and "cut short" in status.target.fault
    assert [status.preset.name for status in catalogue() if status.default] == ["tiny"] or fit.is_apple_silicon()
