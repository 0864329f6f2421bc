"""`cacheblend doctor` says what is wrong, whatever it is, and changes nothing."""

import io
import json
import os
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from cache_store.store import ChunkStore
from cbcli import checks, vllm_check
from cbcli.settings import load_settings
from cbcli.usage_checks import check_documents, check_terminal
from engine import diskprobe
from engine import probe as probing
from engine.kernels.plain import PlainKernels
from engine.machine import Mount, this_machine
from tests.cbcli.terminal import run
from tests.cbcli.world import World, make_world

STATES = {"ok", "warn", "fail"}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    monkeypatch.setattr(probing, "ENOUGH", 0.0)
    monkeypatch.setattr(probing, "FEWEST", 1)
    monkeypatch.setattr(diskprobe, "FILES", 2)
    return made


def ask(world: World, *args: str, code: int = 0, **options: Any) -> dict[str, Any]:
    """The checks by name; of several with one name the worst."""
    found = world.json("doctor", *args, code=code, **options)
    assert found["ok"] == (code == 0)
    by_name: dict[str, Any] = {}
    for check in found["checks"]:
        assert check["state"] in STATES
        if by_name.get(check["name"], {}).get("state") not in ("warn", "fail"):
            by_name[check["name"]] = check
    return by_name


def quick(world: World, *args: str, code: int = 0, **options: Any) -> dict[str, Any]:
    return ask(world, "--no-probe", *args, code=code, **options)


def files(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


def test_on_a_sound_machine_nothing_fails_and_nothing_is_made(world: World) -> None:
    before = files(world.root)
    found = ask(world)
    found.pop("vllm", None)  # an extra
    assert list(found) == [
        *("settings", "python", "torch", "optional", "documents", "cpu", "memory", "threads"),
        *("device", "store", "disk", "retriever", "models", "model", "calibration", "terminal"),
        *("speed", "speed of KV"),
    ]
    assert files(world.root) == before
    assert "none yet" in found["store"]["found"]
    assert found["store"]["facts"]["limit"] == 500_000_000
    assert found["models"]["facts"]["models"] == ["tiny"]
    assert found["python"]["facts"]["version"] == ".".join(map(str, sys.version_info[:3]))


def test_the_figures_of_the_probe_are_there(world: World) -> None:
    found = world.json("doctor")
    assert found["probe"]["linear"][0]["flops"] > 0
    speed = next(check for check in found["checks"] if check["name"] == "speed")
    assert "GFLOP/s" in speed["found"]
    assert world.json("doctor", "--no-probe")["probe"] is None


def test_for_people_a_line_a_check_and_its_hint_below(world: World) -> None:
    result = world("doctor", "--no-probe", "--device", "cuda:99")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert all(line.split()[0] in STATES or line.startswith(" ") for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("fail  device"))
    assert "CUDA devices are usable here" in lines[at]
    assert lines[at + 1].strip() == "use cpu"


def test_a_store_in_numbers(world: World) -> None:
    assert world("ingest", "docs").exit_code == 0
    store = quick(world)["store"]
    assert store["state"] == "ok"
    assert store["facts"]["documents"] == 3
    assert store["facts"]["writable"] is True
    assert "3 documents" in store["found"]


def test_a_damaged_store_is_named(world: World) -> None:
    assert world("ingest", "docs").exit_code == 0
    store = world.root / "home" / "store"
    for database in ("catalog.db", "kv/cache.db"):
        path = store / database
        kept = path.read_bytes()
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        path.write_bytes(b"nonsense" * 1000)
        found = quick(world, code=1)["store"]
        assert found["state"] == "fail"
        assert path.name in found["found"]
        assert found["hint"]
        path.write_bytes(kept)


@pytest.mark.parametrize("kind", ["file", "other files", "link"])
def test_something_else_in_the_stores_place(world: World, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("x")
    else:
        place.mkdir()
        (place / "notes.txt").write_text("mine")
        if kind == "link":
            (place / "kv").symlink_to(tmp_path)
    assert quick(world, "--store", str(place), code=1)["store"]["state"] == "fail"
    assert kind != "file" or place.read_text() == "x"


def test_a_store_that_cannot_be_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/locked")

    monkeypatch.setattr(ChunkStore, "open", refuse)
    found = quick(world, code=1)["store"]
    assert found["found"] == "/locked: Permission denied"
    assert "permissions" in found["hint"]


def test_a_store_that_cannot_be_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checks, "is_writable", lambda folder: False)
        found = quick(world, code=1)["store"]
    assert "cannot be written" in found["hint"]
    assert world("ingest", "docs").exit_code == 0
    monkeypatch.setattr(checks, "is_writable", lambda folder: False)
    assert quick(world)["store"]["state"] == "warn"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top_k = 'many'", "top_k is 'many'"),
        ("topk = 3", "unknown setting 'topk'"),
        ("not toml at all", "not TOML"),
        ("\udcff\udcfe", "not UTF-8"),
    ],
)
def test_a_wrong_settings_file_hides_nothing_else(world: World, text: str, message: str) -> None:
    (world.root / "cacheblend.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    found = quick(world, "--model", "tiny", code=1)
    assert message in found["settings"]["found"]
    assert found["settings"]["hint"]
    assert found["model"]["state"] == "ok"
    assert found["disk"]["state"] in STATES


def test_all_that_is_wrong_in_the_files_is_told(world: World) -> None:
    (world.root / "cacheblend.toml").write_text("topk = 3\nratio = 7\n")
    found = world.json("doctor", "--no-probe", code=1)
    wrong = [check for check in found["checks"] if check["name"] == "settings"]
    assert len(wrong) == 2


def test_the_environment_is_looked_at(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RATIOO", "0.1")
    found = quick(world, code=1)["settings"]
    assert "CACHEBLEND_RATIOO" in found["found"]
    assert "CACHEBLEND_RATIO" in found["hint"]


def test_a_flag_that_is_wrong_is_an_error_of_usage(world: World) -> None:
    assert "--device" in world.error("doctor", "--device", "gpu", code=2)["message"]


def test_a_model_that_is_not_there(world: World) -> None:
    found = quick(world, code=1, model="other")["model"]
    assert (found["state"], "'other'" in found["found"]) == ("fail", True)
    default = quick(world, model="smollm2-135m")["model"]
    assert "not here yet" in default["found"]  # and it isn't got
    assert not (world.root / "home" / "models" / "smollm2-135m").exists()


def test_a_damaged_model(world: World) -> None:
    assert world("models", "pull", "home/models/tiny", "--name", "mine").exit_code == 0
    assert "as it was pulled" in quick(world, model="mine")["model"]["found"]
    weights = world.root / "home" / "models" / "mine" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()  # it may be a link to the one it was pulled from
    weights.write_bytes(content)
    found = quick(world, code=1, model="mine")["model"]
    assert "model.safetensors" in found["found"]
    assert "models rm mine" in found["hint"]
    weights.write_bytes(content[:-5])
    assert quick(world, code=1, model="mine")["model"]["state"] == "fail"
    elsewhere = quick(world)["models"]  # it is another one's trouble now
    assert (elsewhere["state"], "mine: " in elsewhere["found"]) == ("warn", True)


def test_a_folder_of_models_that_is_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.root / "file").write_text("x")
    monkeypatch.setenv("CACHEBLEND_MODELS_DIR", str(world.root / "file"))
    found = quick(world, code=1)
    assert found["models"]["state"] == "fail"
    assert str(world.root / "file") in found["models"]["found"]


def test_torch_that_cannot_be_imported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = ask(world, code=1)
    assert found["torch"]["state"] == "fail"
    assert "torch" in found["torch"]["found"]
    assert found["store"]["state"] == "ok"
    assert "speed" not in found


def test_more_threads_than_cores(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(this_machine(), cores=64, allowed=64, physical=64, quota=2.0)
    monkeypatch.setattr(checks, "this_machine", lambda: machine)
    found = quick(world, "--threads", "64")
    assert found["threads"]["state"] == "warn"
    assert "threads = 2" in found["threads"]["hint"]
    assert "64 cores, 2 of them usable" in found["cpu"]["found"]
    assert "--threads 2" in quick(world, "--threads", "1")["threads"]["hint"]


def test_a_model_larger_than_the_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(this_machine(), memory=10**6, available=1000)
    monkeypatch.setattr(checks, "this_machine", lambda: machine)
    monkeypatch.setattr(probing, "this_machine", lambda: machine)
    found = ask(world)
    assert "more than there is memory" in found["model"]["found"]
    assert found["speed"]["state"] == "warn"
    monkeypatch.setattr(checks, "this_machine", lambda: replace(machine, memory=None))
    assert quick(world)["memory"]["state"] == "warn"


@pytest.mark.parametrize(("kind", "state"), [("nfs4", "warn"), ("tmpfs", "warn"), ("ext4", "ok")])
def test_file_systems(world: World, monkeypatch: pytest.MonkeyPatch, kind: str, state: str) -> None:
    monkeypatch.setattr(checks, "mount_of", lambda folder: Mount(kind, Path("/")))
    monkeypatch.setattr(checks, "LITTLE_DISK", 0)
    disk = quick(world)["disk"]
    assert (disk["state"], disk["facts"]["filesystem"]) == (state, kind)
    monkeypatch.setattr(checks, "LITTLE_DISK", 10**18)
    assert quick(world)["disk"]["state"] == "warn"


def test_what_breaks_transformers_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checks.importlib.util.find_spec

    def find_spec(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "torchvision" else real(name)

    monkeypatch.setattr(checks.importlib.util, "find_spec", find_spec)
    found = quick(world)["beside torch"]
    assert found["state"] == "warn"
    assert "pip uninstall torchvision" in found["hint"]


def test_kernels_that_were_not_built(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.library", lambda: None)
    found = quick(world, "--dtype", "bf16", "--device", "cpu")["device"]
    assert (found["state"], found["facts"]["kernels"]) == ("warn", "torch")
    assert "C compiler" in found["hint"]
    monkeypatch.setenv("CACHEBLEND_NATIVE", "0")
    found = quick(world, "--dtype", "bf16", "--device", "cpu")["device"]
    assert "unset CACHEBLEND_NATIVE" in found["hint"]


def test_kernels_say_what_they_do_without(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = PlainKernels()
    kernels.notes = ("FlexAttention is not used: triton is not installed", "and more")
    monkeypatch.setattr("engine.kernels.kernels_for", lambda device, dtype: kernels)
    found = quick(world, "--dtype", "fp32")["device"]
    assert (found["state"], found["hint"]) == ("ok", "; ".join(kernels.notes))


def test_it_has_help() -> None:
    result = run("doctor", "--help")
    assert result.exit_code == 0
    assert "cacheblend doctor --no-probe" in result.stdout


def test_text_from_outside_is_made_harmless(world: World) -> None:
    (world.root / "cacheblend.toml").write_text('"a\\u001b[2Jb" = 1\n')
    result = world("doctor", "--no-probe")
    assert result.exit_code == 1
    assert "\x1b[2J" not in result.stdout


def test_a_working_folder_that_is_gone(world: World, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    result = world("doctor", "--no-probe", "--json")
    assert result.exit_code in (0, 1)
    told = json.loads((result.stdout or result.stderr).splitlines()[0])
    assert "checks" in told or told["error"]["kind"] != "internal"


def test_a_reader_that_cannot_be_imported_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert quick(world)["documents"]["facts"]["pdf"] is True
    monkeypatch.setitem(sys.modules, "mammoth", None)
    found = quick(world, code=1)["documents"]
    assert found["state"] == "fail"
    assert found["found"].startswith("docx: mammoth: ")
    assert found["hint"].endswith("pip install --force-reinstall mammoth")
    assert (found["facts"]["docx"], found["facts"]["pdf"]) == (False, True)
    monkeypatch.undo()
    monkeypatch.chdir(world.root)
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    (whole,) = [c for c in check_documents() if c.found.startswith("html: ")]
    assert (whole.state, whole.facts["html"]) == ("warn", False)


def test_the_retriever_and_its_model_are_looked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert quick(world)["retriever"]["found"] == "bm25"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "bm25s", None)
        assert quick(world, code=1)["retriever"]["state"] == "fail"
    monkeypatch.setenv("CACHEBLEND_RETRIEVER", "hybrid")
    monkeypatch.setenv("CACHEBLEND_EMBED_MODEL", str(world.root / "nowhere"))
    monkeypatch.setattr("engine.retrieval.embed.require_model2vec", lambda: None)
    found = quick(world, code=1)["retriever"]
    assert (found["state"], "nowhere" in found["found"]) == ("fail", True)
    monkeypatch.setenv("CACHEBLEND_EMBED_MODEL", str(world.root))
    assert quick(world)["retriever"]["facts"]["path"] == str(world.root)


@pytest.mark.parametrize(
    ("version", "engine", "state"),
    [
        (None, "torch", None),
        (None, "vllm", "fail"),
        ("0.32.1", "torch", "ok"),
        ("0.32.0", "vllm", "ok"),
        ("0.33.0", "torch", "warn"),
        ("0.31.4", "vllm", "fail"),
    ],
)
def test_vllm_has_to_be_of_a_version_that_fits(
    version: str | None, engine: str, state: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_check, "installed_version", lambda name: version)
    settings = load_settings({"engine": engine}, env={})
    found = [check.state for check in vllm_check.check_vllm(settings, thorough=False)]
    assert found == ([] if state is None else [state])


def test_versions_of_vllm_are_those_of_the_extra() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    low, high = (".".join(map(str, v)) for v in (vllm_check.FROM, vllm_check.BELOW))
    assert f'"vllm>={low},<{high}"' in project


def test_a_connector_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_check, "installed_version", lambda name: "0.32.0")
    settings = load_settings({"engine": "vllm"}, env={})
    for code, state in (("import no_such_module", "fail"), ("pass", "ok")):
        monkeypatch.setattr(vllm_check, "_CONNECTOR", code)
        (found,) = vllm_check.check_vllm(settings, thorough=True)
        assert (found.state, found.facts["connector"]) == (state, state == "ok")
        assert ("no_such_module" in found.found) is (state == "fail")


def test_a_terminal_that_is_not_utf8_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, state in (("utf-8", "ok"), ("ascii", "warn")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        (found,) = check_terminal()
        assert (found.state, found.facts["terminal"]) == (state, False)
        monkeypatch.undo()
