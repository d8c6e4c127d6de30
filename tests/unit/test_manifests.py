"""Manifests and files of caches as data and as files: merged, shared by processes, and never trusted."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from multigraph_backend.cache import manifest, manifests, shipping, trusted
from multigraph_backend.cache.manifest import Manifest, Used, UsedForm
from multigraph_backend.cache.trusted import Refused
from multigraph_backend.doctor.settings import warm_start

VERSIONS = ("2.13.0", "0.1.1")


def form(value: int, key: str = "a" * 52) -> UsedForm:
    return UsedForm((("s0", value),), (("aot_autograd", key), ("inductor", "f" + key[1:])))


def example(graph: str = "graph", calls: int = 3) -> Manifest:
    used = (Used("generic", calls, (form(5),)), Used("x[0] == 8", 9, (form(8),)))
    return Manifest(graph, "f (f.py:1)", ("f",), used, ("ab/cd.best_config",))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "manifests"
    monkeypatch.setenv(manifests.VARIABLE, str(place))
    monkeypatch.setattr(shipping, "_of_this_process", list)  # what other tests have compiled in it
    return place


# ---------------------------------------------------------------- as data


def test_what_is_written_is_read() -> None:
    assert manifest.from_bytes(manifest.to_bytes(example(), VERSIONS), VERSIONS) == example()


def test_most_used_first_and_then_in_the_order_of_first_use() -> None:
    used = tuple(Used(name, calls) for name, calls in (("a", 1), ("b", 5), ("c", 1), ("d", 7)))
    assert [entry.condition for entry in Manifest("g", used=used).most_used_first()] == ["d", "b", "a", "c"]


def test_merging_adds_calls_and_keeps_the_newest_keys() -> None:
    further = Manifest("graph", used=(Used("x[0] == 8", 2, (form(8, "b" * 52),)), Used("x[0] == 4", 1, (form(4),))))
    both = manifest.merged(example(), further)
    assert [(entry.condition, entry.calls) for entry in both.used] == [
        ("generic", 3),
        ("x[0] == 8", 11),
        ("x[0] == 4", 1),
    ]
    assert both.used[1].forms == (form(8, "b" * 52),)
    # a compile whose code this process had already tells no keys: those that are known stay
    assert manifest.merged(both, Manifest("graph", used=(Used("generic", 1, (UsedForm((("s0", 5),)),)),))).used[
        0
    ].forms == (form(5),)


def test_a_new_process_weighs_more_than_old_ones() -> None:
    assert [entry.calls for entry in manifest.older(example(calls=1)).used] == [1, 5]


def test_the_least_used_go_where_there_are_too_many() -> None:
    many = Manifest("g", used=tuple(Used(f"x[0] == {n}", n) for n in range(manifest.MOST_USED + 10)))
    kept = manifest.merged(Manifest("g"), many)
    assert len(kept.used) == manifest.MOST_USED
    assert min(entry.calls for entry in kept.used) == 10


def changed(change: Callable[[dict[str, object]], object]) -> bytes:
    """With a digest that is right all the same: somebody else made it."""
    read = json.loads(manifest.to_bytes(example(), VERSIONS))
    change(read)
    read["digest"] = manifest._digest(read["manifest"])
    return json.dumps(read).encode()


WHOLE = manifest.to_bytes(example(), VERSIONS)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no whole manifest"),
        (WHOLE[: len(WHOLE) // 2], "no whole manifest"),
        (b"[" * 100_000, "no whole manifest"),
        (b'{"format": 1}', "no whole manifest"),
        (b"\xff\xfe", "no whole manifest"),
        (WHOLE.replace(b'"calls": 9', b'"calls": 8'), "its digest is another one"),
        (WHOLE.replace(b'"format": 4', b'"format": 5'), "it has format 5"),
        (WHOLE.replace(b"2.13.0", b"2.15.0"), "it was written with torch '2.15.0'"),
        (WHOLE.replace(b'"multigraph": "0.1.1"', b'"multigraph": "9"'), "it was written with multigraph '9'"),
        (changed(lambda read: read.update(manifest=[])), "its parts are not what they should be"),
        (changed(lambda read: read["manifest"].update(used=3)), "a list of at most"),  # type: ignore[attr-defined]
        (changed(lambda read: read["manifest"].update(graph=3)), "a short text was expected"),  # type: ignore[attr-defined]
        (changed(lambda read: read["manifest"].update(tuned=["../../etc/x"])), "is no key"),  # type: ignore[attr-defined]
        (changed(lambda read: read["manifest"]["used"][0].update(calls="9")), "a number was"),  # type: ignore[index]
        (
            changed(lambda read: read["manifest"]["used"][0]["forms"][0].update(keys=[["inductor", "../x"]])),  # type: ignore[index]
            "'../x' is no key of torch's caches",
        ),
    ],
)
def test_what_is_no_manifest_of_ours_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        manifest.from_bytes(content, VERSIONS)


@pytest.mark.parametrize("key", ["../x", "/x", "a/b", "a b", "", ".x", "x\n", "x" * 129])
def test_a_key_of_code_is_one_plain_name(key: str) -> None:
    assert not manifest.safe_key("aot_autograd", key)


@pytest.mark.parametrize("key", ["../x", "/a/b", "a/../b", "a//b", "a/.b", "a/b/c/d/e", "a\\b\0"])
def test_a_key_of_a_measured_choice_stays_inside(key: str) -> None:
    assert not manifest.safe_key("autotune", key)
    assert manifest.safe_key("autotune", "ab/cabcdef.best_config")


def test_other_kinds_of_artifacts_are_not_taken() -> None:
    assert not manifest.safe_key("precompile", "abc")


# ---------------------------------------------------------------- as files


def test_a_note_is_there_for_others(folder: Path) -> None:
    assert manifests.load("graph") is None
    assert manifests.note(example())
    assert manifests.load("graph") == example()
    assert {entry.stat().st_mode & 0o777 for entry in (folder, *folder.glob("*.json"))} == {0o700, 0o600}
    assert list(folder.glob(".*")) == []  # nothing half-written is left


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def spoil_mode(path: Path) -> None:
    path.chmod(0o666)


def spoil_owner(path: Path) -> None:
    os.chown(path, 12345, 12345)


def spoil_size(path: Path) -> None:
    path.write_bytes(b" " * (manifest.MOST_BYTES + 1))


def spoil_kind(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def spoil_name(path: Path) -> None:
    path.write_bytes(manifest.to_bytes(example("another"), manifests.versions()))


SPOILT = [
    (spoil_mode, "others may write to it"),
    (spoil_size, "at most"),
    (spoil_kind, "no regular file"),
    (spoil_name, "the manifest of another graph"),
    (lambda path: path.write_bytes(path.read_bytes()[:-40]), "no whole manifest"),
    *([(spoil_owner, "it belongs to user 12345")] if os.geteuid() == 0 else []),
]


@pytest.mark.parametrize(("spoil", "why"), SPOILT)
def test_a_manifest_that_somebody_else_may_have_written_is_refused_and_written_anew(
    folder: Path, spoil: Callable[[Path], object], why: str
) -> None:
    manifests.note(example())
    spoil(only_file(folder))
    assert manifests.load("graph") is None
    assert [why in reason for _, reason in manifests.find().refused] == [True]
    assert manifests.note(example(calls=1))
    assert manifests.load("graph") == example(calls=1)  # of what was there nothing is taken
    assert manifests.find().refused == ()


def test_a_folder_that_others_may_write_to_is_not_used(folder: Path) -> None:
    manifests.note(example())
    folder.chmod(0o777)
    assert manifests.load("graph") is None
    assert not manifests.note(example())
    (said,) = warm_start(os.environ)
    assert said.level == "warning"
    assert "others may write to it (mode 777)" in said.text


def test_those_of_another_version_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests.note(example())
    monkeypatch.setattr(manifests, "versions", lambda: ("3.0.0", "9.9"))
    manifests._tag.cache_clear()
    try:
        assert manifests.load("graph") is None
        assert (manifests.find().manifests, manifests.find().refused, manifests.find().others) == ((), (), 1)
    finally:
        manifests._tag.cache_clear()


def test_those_of_other_files_of_the_package_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that is worked on has one version number, and other keys of caches after each change."""
    manifests.note(example())
    monkeypatch.setattr("multigraph_backend.process.sources.key", lambda: "changed")
    manifests._tag.cache_clear()
    try:
        assert manifests.load("graph") is None
        assert manifests.find().others == 1
    finally:
        manifests._tag.cache_clear()


def test_a_manifest_stays_small_and_so_does_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MOST_BYTES", 4000)
    used = tuple(Used(f"x[0] == {n}", n, (form(n),)) for n in range(100))
    assert manifests.note(Manifest("graph", used=used))
    assert only_file(folder).stat().st_size <= 4000
    kept = manifests.load("graph")
    assert kept is not None
    assert max(entry.calls for entry in kept.used) == 99
    monkeypatch.setattr(manifests, "MOST_MANIFESTS", 3)
    for number in range(6):
        manifests.note(example(f"graph {number}"))
    assert len(list(folder.glob("*.json"))) == 3


def test_eight_processes_lose_none_of_what_they_note(folder: Path) -> None:
    """Each notes fifty calls in fifty notes; while they do, a reader always finds a whole manifest."""
    manifests.note(Manifest("graph", used=(Used("generic", 0),)))
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            for _ in range(50):
                while not manifests.note(Manifest("graph", used=(Used("generic", 1),))):
                    pass  # it waited too long, and keeps it for the next time
            os._exit(0)
        children.append(child)
    while children:
        assert manifests.load("graph") is not None
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            assert status == 0
            children.remove(ended)
    found = manifests.load("graph")
    assert found is not None
    assert [(entry.condition, entry.calls) for entry in found.used] == [("generic", 400)]


def test_a_process_that_dies_with_the_lock_blocks_nobody(folder: Path) -> None:
    manifests.note(example())
    child = os.fork()
    if child == 0:
        with manifests._locked(folder):
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    started = time.monotonic()
    assert manifests.note(example())
    assert time.monotonic() - started < manifests.PATIENCE


def test_who_waits_too_long_for_others_notes_nothing_this_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests.note(example())
    monkeypatch.setattr(manifests, "PATIENCE", 0.05)
    with manifests._locked(folder):
        assert not manifests.note(example())


def test_nothing_is_noted_in_a_folder_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(manifests.VARIABLE, str(tmp_path / "file" / "below"))
    assert not manifests.note(example())
    assert manifests.load("graph") is None


def test_a_folder_may_begin_at_home_and_blanks_name_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(manifests.VARIABLE, " ~/noted ")
    assert manifests.folder() == tmp_path / "noted"
    monkeypatch.setenv(manifests.VARIABLE, " ")
    assert not manifests.kept()


def test_an_error_of_a_write_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "file", tmp_path):
        with pytest.raises(OSError, match=re.escape(f"'{path}'")) as error:
            trusted.write(path, b"content")
        assert ".new" not in str(error.value)


def test_the_doctor_says_what_is_there(folder: Path) -> None:
    manifests.note(example())
    manifests.note(example("another"))
    said = list(warm_start(os.environ))
    assert [(finding.level, finding.facts.get("manifests"), finding.facts.get("used")) for finding in said] == [
        ("ok", 2, 4)
    ]
    next(folder.glob("*.json")).write_text("{}")
    said = list(warm_start(os.environ))
    assert [finding.level for finding in said] == ["ok", "warning"]
    assert "is refused: it is no whole manifest" in said[1].text
    assert [finding.text for finding in warm_start({manifests.VARIABLE: ""})] == [
        "MULTIGRAPH_MANIFESTS is empty: nothing is noted, and nothing loaded ahead"
    ]


# ---------------------------------------------------------------- one file for the next machine


LIBRARY = "rj/crjwaf.main.so"


@pytest.fixture
def shipped(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with two entries of a cache that torch would not look into, and one manifest."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "first"))
    for kind, key in (("aot_autograd", "a" * 52), ("inductor", "f" + "a" * 51)):
        place = shipping._compat.cache_entry(kind, key)
        place.mkdir(parents=True)
        (place / "entry").write_bytes(b"what torch wrote")
        (place / ".half").write_bytes(b"what it is writing")
    choice = shipping._compat.cache_entry("autotune", "ab/cd.best_config")
    choice.parent.mkdir()
    choice.write_text('{"XBLOCK": 8}')
    library = shipping._compat.cache_entry("native", LIBRARY)
    library.parent.mkdir()
    library.write_bytes(b"what no linker wrote")
    path = tmp_path / "caches"
    # Inductor's entries are looked into for Triton's binaries when they are put back, so they must be torch's
    keys = (("aot_autograd", "a" * 52), ("native", LIBRARY))
    used = dataclasses.replace(example(), used=(Used("generic", 3, (UsedForm((("s0", 5),), keys),)),))
    done = shipping.save(path, [used])
    assert (done.artifacts, done.manifests, done.native, done.lacking) == (2, 1, 1, 0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "second"))
    return path


def places(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "second").rglob("*") if path.is_file())


def test_what_was_saved_is_in_the_caches_again(shipped: Path, tmp_path: Path) -> None:
    done = shipping.load(shipped)
    assert (done.artifacts, done.manifests, done.native, done.lacking) == (2, 1, 0, 1)
    assert not shipping._compat.cache_entry("native", LIBRARY).exists()  # it is none that can be loaded
    entries = shipping._compat.cache_entry("aot_autograd", "a" * 52)
    assert [path.read_bytes() for path in entries.iterdir()] == [b"what torch wrote"]
    assert shipping._compat.cache_entry("autotune", "ab/cd.best_config").read_text() == '{"XBLOCK": 8}'
    assert manifests.load("graph") is not None
    assert shipped.stat().st_mode & 0o777 == 0o600


def header_says(**other: object) -> Callable[[Path], object]:
    def spoil(path: Path) -> None:
        magic, header, payload = path.read_bytes().split(b"\n", 2)
        changed = {**json.loads(header), **other}
        path.write_bytes(b"\n".join((magic, json.dumps(changed).encode(), payload)))

    return spoil


def test_libraries_are_for_one_processor(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(shipping.ctypes, "CDLL", taken.append)
    assert shipping.load(shipped).native == 1
    assert shipping._compat.cache_entry("native", LIBRARY).read_bytes() == b"what no linker wrote"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "third"))
    header_says(processor="another")(shipped)
    done = shipping.load(shipped)
    assert (done.artifacts, done.native, done.lacking) == (2, 0, 1)
    assert not shipping._compat.cache_entry("native", LIBRARY).exists()
    assert len(taken) == 1


def test_a_library_of_several_kernels_goes_along_once(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "first"))
    names = [f"{letters}/c{letters}{'x' * 40}.main.so" for letters in ("ab", "cd", "ef")]
    for name, content in zip(names, (b"two kernels" * 1000, b"two kernels" * 1000, b"another" * 1000), strict=True):
        library = shipping._compat.cache_entry("native", name)
        library.parent.mkdir(parents=True)
        library.write_bytes(content)
    path = tmp_path / "caches"
    keys = tuple(("native", name) for name in names)
    shipping._compat.cache_entry("aot_autograd", "a" * 52).mkdir(parents=True)
    Path(shipping._compat.cache_entry("aot_autograd", "a" * 52), "entry").write_bytes(b"what torch wrote")
    used = (Used("generic", 3, (UsedForm((("s0", 5),), (("aot_autograd", "a" * 52), *keys)),)),)
    done = shipping.save(path, [dataclasses.replace(example(), used=used)])
    assert done.native == 3
    assert path.read_bytes().count(b"two kernels") == 1000
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "second"))
    monkeypatch.setattr(shipping.ctypes, "CDLL", lambda path: None)
    assert shipping.load(path).native == 3
    first, second, third = (shipping._compat.cache_entry("native", name) for name in names)
    assert first.samefile(second)
    assert not first.samefile(third)
    assert (first.read_bytes(), third.read_bytes()) == (b"two kernels" * 1000, b"another" * 1000)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)


def escape(path: Path) -> None:
    """A file that is right in all but one key, which leads out of torch's folder."""
    magic, header, _ = path.read_bytes().split(b"\n", 2)
    artifacts = shipping._serialized([("aot_autograd", "../../outside", b"x")])
    said = {**json.loads(header), "artifacts": len(artifacts), "manifests": [], "libraries": [], "native": []}
    said["digest"] = shipping.hashlib.sha256(artifacts).hexdigest()
    path.write_bytes(b"\n".join((magic, json.dumps(said).encode(), artifacts)))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_bytes(b""), "no file of multigraph's caches"),
        (lambda path: path.write_bytes(b"\x80\x04."), "no file of multigraph's caches"),
        (lambda path: path.write_bytes(path.read_bytes()[:30]), "its header is not whole"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "it was cut off"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "something was added to it"),
        (flip, "its digest is another one"),
        (header_says(format=9), "it has format 9"),
        (header_says(torch="2.0.0"), "it was saved with torch '2.0.0'"),
        (header_says(multigraph="9.9"), "it was saved with multigraph '9.9'"),
        (header_says(python="CPython 2.7"), "it was saved with python 'CPython 2.7'"),
        (header_says(machine="Linux riscv64"), "it was saved with machine 'Linux riscv64'"),
        (header_says(artifacts=-1), "its header is not whole"),
        (header_says(manifests="many"), "its header is not whole"),
        (escape, "is no key of torch's caches"),
        (header_says(libraries=[-20]), "its header is not whole"),
        (header_says(native=[[LIBRARY, 1]]), "its header is not whole"),
        (header_says(native=[[LIBRARY, -1]]), "its header is not whole"),
        (header_says(native=[["../../outside.so", 0]]), "has no place in torch's caches"),
        (header_says(native=[[3, 0]]), "has no place in torch's caches"),
        (header_says(native=[["rj/crjwaf.main.so"]]), "its header is not whole"),
        (spoil_mode, "others may write to it"),
        (spoil_kind, "no regular file"),
        *([(spoil_owner, "it belongs to user 12345")] if os.geteuid() == 0 else []),
    ],
)
def test_a_file_that_is_not_what_we_wrote_is_refused_and_nothing_is_taken(
    shipped: Path, tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    spoil(shipped)
    with pytest.raises(shipping.CacheRefused, match=why):
        shipping.load(shipped)
    assert places(tmp_path) == []
    assert not (tmp_path / "outside").exists()
    assert manifests.load("graph") is None


def test_a_file_is_of_limited_size(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "MOST_BYTES", 100)
    with pytest.raises(shipping.CacheRefused, match="at most 100 are read"):
        shipping.load(shipped)


def test_entries_that_others_may_write_to_are_left_out(tmp_path: Path, folder: Path, shipped: Path) -> None:
    shipping.load(shipped)
    entries = shipping._compat.cache_entry("aot_autograd", "a" * 52)
    for path in entries.iterdir():
        path.chmod(0o666)
    done = shipping.save(tmp_path / "again", manifests.find().manifests)
    assert (done.artifacts, done.lacking) == (1, 2)  # the library was not taken before


def test_nothing_to_save_is_said(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(shipping.CacheRefused, match="nothing is there to save"):
        shipping.save(tmp_path / "caches", [example()])
    assert not (tmp_path / "caches").exists()


def test_a_model_that_no_manifest_names_is_said_with_those_that_are_there() -> None:
    entry = example()
    assert entry.names
    with pytest.raises(shipping.CacheRefused, match=f"no manifest is of 'Nope'; there are: .*{entry.names[0]}"):
        shipping.of_model([entry], "Nope")
    assert shipping.of_model([], "Nope") == []
    assert shipping.of_model([entry], f"{entry.names[0][:-1]}?") == [entry]


def test_manifests_that_cannot_be_noted_are_not_counted(
    tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(manifests.VARIABLE, str(tmp_path / "file"))
    assert shipping.load(shipped).manifests == 0


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    trusted.write(path, b"before")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        trusted.write(path, b"after")
    assert path.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
