"""Run one stage notebook of nbs/stages/ and save what it shows.

  python3 tools/stage.py                                        list the stages and their parameters
  python3 tools/stage.py inpaint -p mixer=afno -p seed=0        run one

The executed notebook goes to --out, in a form that is the same bytes after every run. After an error it lies at
<out>.failed.ipynb instead. Ctrl-C and `kill` let the notebook save its state first; a second one ends it at once.
"""

# ruff: noqa: E402 - the top must run on any Python, with nothing installed
import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NEEDED = ("papermill", "ipykernel", "torch")


def use_environment():
    "Continue in the project's environment if this Python lacks what a stage needs, and put its commands first in PATH."
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    venv = os.path.join(ROOT, ".venv")
    python = os.path.join(venv, "bin", "python")
    if missing and os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(venv):
        os.execv(python, [python, *sys.argv])
    if missing:
        sys.exit(f"{sys.executable} has no {', '.join(missing)}; run `make setup`, or activate the environment")
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", os.defpath)


if __name__ == "__main__":
    use_environment()

import argparse
import ast
import contextlib
import logging
import signal
import threading
import time
import types
import typing
from pathlib import Path

ROOT = Path(ROOT)
STAGES = ROOT / "nbs" / "stages"
PATIENCE = 120  # seconds that a notebook may take to save its state when nobody is left to press Ctrl-C again


class Refused(Exception):
    "The caller asked for something that cannot be run; the message is one line."


# --- What was asked for ------------------------------------------------------------------------------------------------


def find_notebook(stage: str) -> Path:
    "Find the notebook of `stage`."
    path, known = STAGES / f"{stage}.ipynb", ", ".join(sorted(p.stem for p in STAGES.glob("*.ipynb")))
    if not path.exists():
        raise Refused(f"no stage {stage!r}; stages are {known or 'none'}; see nbs/stages/")
    return path


def declared_parameters(path: Path) -> dict:
    "Read names, types, defaults and comments in the cell tagged 'parameters'."
    import nbformat

    cells = [c.source for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])]
    if not cells:
        raise Refused(f"nbs/stages/{path.name} has no cell tagged 'parameters'; tag the cell that holds the defaults")
    lines, found = cells[0].splitlines(), {}
    for node in ast.parse(cells[0]).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and getattr(node, "value", None):
            kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            rest = lines[node.end_lineno - 1].encode()[node.value.end_col_offset :].decode()
            comment = rest.partition("#")[2].strip()
            found[target.id] = {"type": kind, "default": ast.unparse(node.value), "help": comment}
    return found


def annotation(text: str) -> object:
    "Turn the text of an annotation into a type; None if it says nothing that can be checked."
    names = {k: getattr(typing, k) for k in ("Optional", "Union", "Literal", "Any")}
    names |= {t.__name__: t for t in (bool, int, float, str, list, dict, tuple)}
    try:
        return eval(compile(ast.parse(text, mode="eval"), "annotation", "eval"), {"__builtins__": {}}, names)
    except Exception:
        return None


def fits(value: object, kind: object) -> bool:
    "Say whether `value` has the type `kind` (an int may stand for a float)."
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is None or kind is typing.Any:
        return value is None or kind is typing.Any
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, k) for k in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is not None:
        items = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(fits(item, inner[-1]) for item in items)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def read_value(stage: str, name: str, text: str, declared: dict) -> object:
    "Read the text of a value as YAML (or as it is, where text is wanted), and check it against the declared type."
    import yaml

    words = declared["type"]
    kind = annotation(words) if words else None
    if kind is None:
        with contextlib.suppress(ValueError, SyntaxError):
            default = ast.literal_eval(declared["default"])
            kind, words = (None, words) if default is None else (type(default), type(default).__name__)
    if kind is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise Refused(f"stage {stage}: {name}={text!r} cannot be read as YAML; put it in quotes") from None
    if kind is None or fits(value, kind):
        return float(value) if kind is float else value
    if kind is not type(None) and fits(text, kind):
        return text
    hint = " (YAML reads 1e-3 as text: write 0.001)" if isinstance(value, str) and "float" in words else ""
    raise Refused(
        f"stage {stage}: {name}={text} is {type(value).__name__}, allowed is {words}{hint}; correct the value"
    )


def read_parameters(stage: str, path: Path, given: list, tier: str) -> dict:
    "Read all parameters of a stage from the command line."
    import yaml

    known, values = declared_parameters(path), {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise Refused(f"stage {stage}: -p {text} has no value; write -p name=value")
        if name not in known:
            raise Refused(
                f"stage {stage}: no parameter {name!r}; its parameters are {', '.join(known)}; correct the name"
            )
        values[name] = read_value(stage, name, value, known[name])
    current = ROOT / "params.yaml"
    current = (yaml.safe_load(current.read_text()) or {}).get("tier") if current.exists() else None
    wanted = tier or values.get("tier") or current
    if wanted and "tier" in known:
        if current and wanted != current:
            raise Refused(
                f"stage {stage}: --tier {wanted}, but params.yaml holds tier {current};"
                f" run `make repro TIER={wanted}`, or copy params/{wanted}.yaml onto params.yaml"
            )
        values["tier"] = wanted
    elif tier:
        raise Refused(f"stage {stage}: no parameter 'tier'; its parameters are {', '.join(known)}; leave out --tier")
    return {name: values[name] for name in known if name in values}


def list_stages() -> None:
    "Print each stage with its parameters and their defaults."
    import nbformat

    for path in sorted(STAGES.glob("*.ipynb")):
        first = nbformat.read(path, 4).cells[0].source
        print(path.stem, next((f": {line[2:]}" for line in first.splitlines() if line.startswith("> ")), ""), sep="")
        with contextlib.suppress(Refused):
            for name, p in declared_parameters(path).items():
                print(f"    -p {name}={p['default']}  {p['help']}".rstrip())


# --- Signals -----------------------------------------------------------------------------------------------------------


class Stop:
    "Passes a request to stop on to the kernel: once as an interrupt, when asked again as an end."

    def __init__(self):
        self.signal, self.kernel, self.listening, self.told, self.orphan = 0, 0, False, False, False

    def install(self) -> None:
        "Catch Ctrl-C, `kill` and a closed terminal (unless nohup is in force)."
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.caught)

    def caught(self, number: int, frame: object) -> None:
        "Remember the signal and tell the kernel; the second one kills it."
        if self.signal:
            self.kill()
            return
        self.signal = number
        say("stopping: waiting for the notebook to save its state (once more to end it at once)")
        self.tell()
        if self.orphan or number == signal.SIGHUP:
            timer = threading.Timer(PATIENCE, self.kill)
            timer.daemon = True
            timer.start()

    def tell(self) -> None:
        "Interrupt the kernel once, but only while it executes a cell: outside of cells it ignores interrupts."
        if self.signal and self.listening and self.kernel and not self.told:
            self.told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.kernel, signal.SIGINT)

    def kill(self) -> None:
        "End the kernel and the processes it started."
        if self.kernel:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.kernel, signal.SIGKILL)  # it leads its own session
        else:
            os._exit(128 + (self.signal or signal.SIGTERM))

    def watch_parent(self) -> None:
        "When DVC started this process, stop as if asked to when DVC is gone: nobody would record the results."
        if "DVC_STAGE" not in os.environ:
            return
        import psutil

        watched = psutil.Process().parents()[:1]
        if watched and "-c" in watched[0].cmdline():  # the shell that DVC uses
            watched = psutil.Process().parents()[:2]
        if not watched:
            return

        def watch():
            while all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in watched):
                time.sleep(0.5)
            self.orphan = True
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, daemon=True).start()


class Stream:
    "A terminal or file that may vanish while we write to it."

    def __init__(self, file):
        self.file = file

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.file.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.file.flush()


def say(text: str) -> None:
    "Print one line to stderr."
    stream = Stream(sys.stderr)
    stream.write(text + "\n")
    stream.flush()


# --- The run -----------------------------------------------------------------------------------------------------------

# What the kernel process runs. It dies with its parent: on Linux at once; ipykernel's own poller, which serves elsewhere,
# misses a parent that dies before the poller starts.
KERNEL = """
import ctypes, os, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(os.environ["JPY_PARENT_PID"]):
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
"""


def prepare_environment() -> None:
    "Set what the kernel finds in its environment: the same for every caller, and nothing of the caller's IPython."
    own = ROOT / "work" / ".home"
    home = Path.home() if os.environ.get("HOME") else None
    folders = {"IPYTHONDIR": "ipython"}  # never the caller's start-up files
    if home is None or not os.access(home, os.W_OK):
        folders |= {"JUPYTER_RUNTIME_DIR": "jupyter", "MPLCONFIGDIR": "matplotlib", "XDG_CACHE_HOME": "cache"}
    for name, folder in folders.items():
        (own / folder).mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(own / folder)
    os.environ |= {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONHASHSEED": "0", "AFNO_ROOT": str(ROOT)}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault(
        "GOMP_SPINCOUNT", "3000"
    )  # threads that spin long while they wait slow a busy machine tenfold
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a debugger's warning in every kernel
    os.environ.pop("MPLBACKEND", None)  # pictures belong into the notebook


def execute(path: Path, target: Path, values: dict, stop: Stop) -> None:
    "Execute a notebook with papermill, saving it to `target` after each cell."
    import papermill
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient.exceptions import CellExecutionError
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine, papermill_engines

    class KernelManager(AsyncKernelManager):
        "Starts this very Python, whatever kernels the machine knows."

        @property
        def kernel_spec(self):
            argv = [
                sys.executable,
                "-c",
                KERNEL,
                "-f",
                "{connection_file}",
                "--log-level=CRITICAL",
                "--HistoryManager.enabled=False",
            ]
            return KernelSpec(argv=argv, display_name="python3", language="python")

    class Client(PapermillNotebookClient):
        "Passes signals on, and begins no cell after one."

        def papermill_execute_cells(self):
            stop.kernel = self.km.provisioner.pid
            for index, cell in enumerate(self.nb.cells):
                if stop.signal:
                    return
                self.nb_man.cell_start(cell, index)
                try:
                    self.execute_cell(cell, index)
                except CellExecutionError as error:
                    self.nb_man.cell_exception(cell, cell_index=index, exception=error)
                    return
                finally:
                    stop.listening = False
                    self.nb_man.cell_complete(cell, cell_index=index)

        def process_message(self, msg, cell, cell_index):
            if msg["msg_type"] == "execute_input":  # from here on the kernel heeds interrupts
                stop.listening = True
                stop.tell()
            return super().process_message(msg, cell, cell_index)

    class StageEngine(NBClientEngine):
        "papermill's engine with this client."

        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, start_timeout=120, **kwargs):
            chosen = {k: kwargs[k] for k in ("stdout_file", "stderr_file")}
            Client(
                nb_man,
                kernel_name=kernel_name,
                startup_timeout=start_timeout,
                timeout=None,
                kernel_manager_class=KernelManager,
                **chosen,
            ).execute()

    logging.getLogger("papermill").setLevel(logging.ERROR)  # it does not know annotations such as int | None
    papermill_engines.register("stage", StageEngine)
    papermill.execute_notebook(
        path,
        target,
        values,
        engine_name="stage",
        kernel_name="python3",
        language="python",
        cwd=ROOT,
        progress_bar=False,
        start_timeout=120,
        stdout_file=Stream(sys.stdout),
        stderr_file=Stream(sys.stderr),
    )


def run(stage: str, given: list, tier: str, out: str, stop: Stop) -> int:
    "Run one stage; return the exit code."
    path = find_notebook(stage)
    values = read_parameters(stage, path, given, tier)
    prepare_environment()
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from stabilise import nbformat, stabilise, write

    target = Path(out).absolute() if out else default_output(stage, values)
    if target.suffix != ".ipynb":
        raise Refused(f"stage {stage}: --out {out} must end in .ipynb; correct the name")
    target.parent.mkdir(parents=True, exist_ok=True)
    running, failed = target.with_suffix(".running.ipynb"), target.with_suffix(".failed.ipynb")
    stop.watch_parent()
    error, begun = "", time.monotonic()
    try:
        execute(path, running, values, stop)
    except PapermillExecutionError as caught:
        error = f"{caught.ename}: {caught.evalue}" if caught.evalue else caught.ename
        if caught.ename == "KeyboardInterrupt":
            stop.signal = stop.signal or signal.SIGINT
    except DeadKernelError:
        error = "the notebook's process died (killed, or out of memory?)"
    except Exception as caught:  # the machinery's own: no free port, a full disk, a kernel that does not start
        error = f"{type(caught).__name__}: {caught}"
    if stop.signal or error:
        log = "no log was written"
        if running.exists():
            os.replace(running, failed)
            log = f"full log: {os.path.relpath(failed)}"
        if stop.signal:
            say("interrupted; run the same command again to resume")
            return 128 + stop.signal
        say(f"stage {stage} failed: {' '.join(error.split())[:1000]} ({log})")
        return 1
    write(stabilise(nbformat.read(running, 4)), target)
    running.unlink()
    failed.unlink(missing_ok=True)
    say(f"stage {stage}: {time.monotonic() - begun:.0f} s, {os.path.relpath(target)}")
    return 0


def default_output(stage: str, values: dict) -> Path:
    "Name the executed notebook after the tier and the other values: reports/smoke/inpaint/afno-0.ipynb."
    tier, rest = values.get("tier", "untiered"), [str(v) for k, v in values.items() if k != "tier"]
    return ROOT / "reports" / tier / (f"{stage}/{'-'.join(rest)}.ipynb" if rest else f"{stage}.ipynb")


def main() -> int:
    "Read the command line and run."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", help="name of a notebook in nbs/stages/, without its ending")
    parser.add_argument("--tier", default="", help="must be the tier that params.yaml holds (the default)")
    parser.add_argument("-p", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the stage")
    parser.add_argument("--out", default="", help="executed notebook (reports/<tier>/<stage>/<values>.ipynb)")
    given = parser.parse_args()
    stop = Stop()
    stop.install()
    try:
        if given.stage is None:
            list_stages()
            return 0
        return run(given.stage, given.p, given.tier, given.out, stop)
    except Refused as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
