"""The command itself: help, lazy commands, the nearest command, usage errors."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time

import pytest

from cbcli.main import COMMANDS
from tests.cbcli.terminal import run

PRESENT = [name for name, (module, _) in COMMANDS.items() if importlib.util.find_spec(module)]
HEAVY = [
    *["torch", "transformers", "tokenizers", "huggingface_hub", "gguf", "safetensors", "numpy"],
    *["bm25s", "jinja2", "rich", "engine.api", "engine.model", "vllm"],
]


def test_help_lists_every_command_with_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "..." not in result.stdout.replace("[ARGS]...", "")
    for name, (_, line) in COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert line in result.stdout
    assert "cacheblend ask '" in result.stdout


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("cacheblend 0.")


def test_an_interrupt_while_it_is_imported_shows_no_traceback() -> None:
    code = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "cbcli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from cbcli.entry import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("args", [(), ("models",), ("config",)])
def test_without_a_command_help_goes_to_stderr(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Commands:" in result.stderr


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["aks"], "no such command: 'cacheblend aks'", "did you mean 'cacheblend ask'?"),
        (["models", "list"], "no such command: 'cacheblend models list'", "models ls'?"),
        (["xyzzy"], "no such command: 'cacheblend xyzzy'", "see cacheblend --help"),
        (["models", "ls", "--jsn"], "no such option: --jsn", "did you mean --json or"),
        (["ask", "--ratoi", "1"], "no such option: --ratoi", "did you mean --ratio? see"),
        (["ask", "who", "is"], "unexpected extra argument(s) (is)", "in quotes"),
        (["search", "--min-score", "x", "y"], "'--min-score': expected a number", "--help"),
        (["ask", "--order", "scoer", "x"], "--order is 'scoer'", "did you mean score?"),
        (["store", "pin", "--document", "x"], "no such option: --document", "without a flag"),
        (["help"], "no such command: 'cacheblend help'", "did you mean 'cacheblend --help'?"),
        (["config", "get"], "no such command: 'cacheblend config get'", "config show'?"),
        (["models", "get"], "no such command: 'cacheblend models get'", "models pull'?"),
        (["models", "show"], "missing argument 'name'", "see cacheblend models show --help"),
        (["models", "ls", "extra"], "unexpected extra argument(s) (extra)", "models ls --help"),
        (["models", "show", "x", "--models-dir"], "requires an argument", "--help"),
    ],
)
def test_wrong_usage_is_one_line_with_advice_and_exit_2(
    args: list[str], message: str, hint: str
) -> None:
    result = run(*args)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
    assert hint in line
    result = run(*args, "--json") if "--models-dir" not in args else run(*args[:2], "--json", "-x")
    assert result.exit_code == 2
    told = json.loads(result.stderr)["error"]
    assert told["kind"] == "usage"
    assert told["hint"]


def test_help_says_what_each_command_does_in_a_whole_sentence() -> None:
    for group in ((), ("store",), ("config",), ("models",), ("bench",)):
        text = run(*group, "--help").stdout
        assert "..." not in text.split("\nCommands:\n")[1]
    assert "<list[" not in run("ingest", "--help").stdout


def every_command() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name in PRESENT:
        text = run(name, "--help").stdout
        if "\nCommands:\n" not in text:
            found.append((name,))
            continue
        listed = text.split("\nCommands:\n")[1].split("\n\n")[0]
        found += [(name, line.split()[0]) for line in listed.splitlines() if line[2:3] != " "]
    return found


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_every_command_has_help_an_example_and_the_common_options(
    command: tuple[str, ...],
) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    text = result.stdout
    assert f"cacheblend {' '.join(command)}" in text.split("Examples:")[1]
    for option in ("--json", "-q, --quiet", "-v, --verbose", "-h, --help"):
        assert option in text


@pytest.mark.parametrize(
    "args",
    [
        *(["--help"], ["models", "ls"], ["nonsense"]),
        *([name, "--help"] for name in PRESENT),
        *([*command, "--help"] for command in every_command() if len(command) > 1),
    ],
    ids=" ".join,
)
def test_light_commands_import_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\nfrom cbcli.main import app\n"
        "try: app(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_the_shortest_way_is_quick() -> None:
    """Best of three, for the machine may be busy; a heavy import would take over a second."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "from cbcli.main import main; main()", "--help"],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.6


@pytest.mark.parametrize(
    "where",
    [
        # Python ignores an exception in a finalizer: the command must end all the same.
        "class Held:\n"
        "    def __del__(self): raise KeyboardInterrupt\n"
        "def work(*args):\n"
        "    held = Held(); del held\n"
        "    time.sleep(300); print('went on')\n"
        "cbcli.command.Group.invoke.__globals__['TyperGroup'].invoke = work\n",
        "def work(*args): raise KeyboardInterrupt\ncbcli.command.Group.parse_args = work\n",
    ],
    ids=["finalizer", "parsing"],
)
def test_an_interrupt_anywhere_ends_the_command_and_says_so(where: str) -> None:
    code = f"import sys, time, cbcli.command, cbcli.main\n{where}cbcli.main.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "config", "show"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


SWALLOWED = {
    "by a finalizer": "class Last:\n    def __del__(self): kill()\nlast = Last()\ndel last",
    "by an import": "try:\n    kill()\nexcept:\n    pass",
    "by nobody, in the midst of ending": "try:\n    kill()\nfinally:\n    kill()",
}


@pytest.mark.parametrize("how", SWALLOWED)
def test_a_polite_end_is_never_lost(how: str) -> None:
    code = f"""
import os, signal, time
import cbcli.main as m

def kill():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(3):
        time.sleep(0.001)

def app():
    exec({SWALLOWED[how]!r}, {{"kill": kill}})
    time.sleep(20)

m.app = app
m.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")


def test_a_polite_end_when_all_is_done_shows_no_traceback() -> None:
    code = """
import atexit, os, signal
import cbcli.main as m

atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
m.app = lambda: None
m.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
