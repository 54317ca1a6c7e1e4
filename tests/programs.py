"""Start the commands of this package in processes that need not import torch.

A program is a fork of the server of `tests.processes`, and so is the Python that it starts itself,
such as the ranks of a launcher: a new interpreter takes seconds to import torch. Arguments,
variables, output, signals, parents and exit codes are those of new interpreters, which the tests of
`tests/launching`, the README in `tests/test_docs.py` and `tests/test_wheel.py` start.
"""

import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, Self

from tests.processes import FORKS
from torchtitan_diloco.base.hardware import end_with_parent
from torchtitan_diloco.base.process import run_and_exit

PATIENCE = 240.0
"""Seconds after which a program is considered to hang."""
FORKED = ("torchtitan_diloco", "benchmarks", "tests")
"""Packages whose modules are run in forks."""
LOOK_SECONDS = 0.02
POPEN = subprocess.Popen
Main = Callable[[list[str]], int]


class Program:
    """A program in a fork, with the methods of `subprocess.Popen`, which is killed at the end.

    `console`: the file to which it prints. `main`: the name of a module, or a function that returns
    the exit code. `errors`: the file of the error output, if it is another one. `variables`: its
    environment, instead of that of this process.
    """

    def __init__(
        self,
        console: Path,
        words: Iterable[object],
        *,
        main: Main | str = "torchtitan_diloco",
        errors: Path | None = None,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.console = console
        self.errors = errors or console
        for path in (self.console, self.errors):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        self._process = FORKS.Process(
            target=_run_as_program,
            args=(
                main,
                [str(word) for word in words],
                dict(os.environ if variables is None else variables),
                folder or Path.cwd(),
                self.console,
                self.errors,
            ),
            daemon=True,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = PATIENCE) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self.console), timeout, self.printed().encode())
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the program, whether or not it is stopped, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self._process.join()

    def printed(self) -> str:
        return self.console.read_text(errors="replace")

    def end(self, code: int = 0) -> str:
        """Wait for the end of the program, check its exit code, and return what it has printed."""
        assert self.wait() == code, self.printed() + self.errors.read_text(errors="replace")
        return self.printed()

    def line(self, begin: str) -> str:
        """Wait for the first line that begins with a text, and return the rest of that line."""
        until = time.monotonic() + PATIENCE
        while True:
            has_ended = self.poll() is not None
            for line in self.printed().splitlines(keepends=True):
                if line.startswith(begin) and line.endswith("\n"):
                    return line.removeprefix(begin).strip()
            assert not has_ended, self.printed()
            assert time.monotonic() < until, self.printed()
            time.sleep(LOOK_SECONDS)


def run_program(
    console: Path, words: Iterable[object], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its exit code, output and error output."""
    errors = console.with_suffix(".errors.txt")
    with Program(console, words, errors=errors, **options) as program:
        code = program.wait()
    return subprocess.CompletedProcess(str(console), code, program.printed(), errors.read_text())


def popen(args: Any, **options: Any) -> Any:
    """Stand in for `subprocess.Popen` in this process, where modules of this package are programs.

    A program is no child of this process, and its output is a file.
    """
    command = _module_of(args)
    if command is None:
        return POPEN(args, **options)
    module, words, _ = command
    return Program(
        Path(options["stdout"].name),
        words,
        main=module,
        folder=options.get("cwd"),
        variables=options.get("env"),
    )


class Fork(subprocess.Popen[Any]):
    """A Popen that runs modules of this package, and files, in forks of this process.

    Popen calls `preexec_fn` right before it would execute a program, and this one does not return.
    """

    def __init__(
        self,
        args: Any,
        *,
        env: Mapping[str, str] | None = None,
        preexec_fn: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        command = _module_of(args)
        if command is not None:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # else the fork prints it as well
            variables = dict(os.environ if env is None else env)
            preexec_fn = partial(_run_in_place, *command, variables, preexec_fn)
        super().__init__(args, env=env, preexec_fn=preexec_fn, **options)


def _module_of(command: Any) -> tuple[str, list[str], bool] | None:
    """Return what a command runs in Python, if that is a module of this package or a file, with
    its arguments, and whether its output has no buffer."""
    words = [command] if isinstance(command, str) else [str(word) for word in command]
    if words[0] != sys.executable:
        return None
    is_unbuffered = words[1:2] == ["-u"]
    match words[1 + is_unbuffered :]:
        case ["-m", module, *arguments] if module.partition(".")[0] in FORKED:
            return module, arguments, is_unbuffered
        case [path, *arguments] if path.endswith(".py"):
            return path, arguments, is_unbuffered
    return None


def _run_in_place(
    module: str,
    words: list[str],
    is_unbuffered: bool,
    variables: Mapping[str, str],
    prepare: Callable[[], Any] | None,
) -> NoReturn:
    """Run a module in a fork that a Popen has prepared, in place of a new interpreter."""
    if prepare is not None:
        prepare()
    # Close all other files, as a new interpreter does: Popen waits for that. Their numbers stay in
    # use, because objects of the process that was forked may close them again.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if number > 2 and number != nothing:
            os.dup2(nothing, number, inheritable=False)
    _run(module, words, variables, is_unbuffered=is_unbuffered)


def _run_as_program(
    main: Main | str,
    words: list[str],
    variables: Mapping[str, str],
    folder: Path,
    console: Path,
    errors: Path,
) -> NoReturn:
    """Run a program in a fork of the server, in a process group of its own, until that ends."""
    end_with_parent()
    os.setpgid(0, 0)
    for number, path, flags in (
        (0, Path(os.devnull), os.O_RDONLY),
        (1, console, os.O_WRONLY | os.O_APPEND),
        (2, errors, os.O_WRONLY | os.O_APPEND),
    ):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    mp.current_process().daemon = False  # it may have children
    _run(main, words, variables, is_unbuffered=False)


def _run(
    main: Main | str, words: list[str], variables: Mapping[str, str], *, is_unbuffered: bool
) -> NoReturn:
    """Call a function, or run a module, as a new interpreter does, and end the process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(variables)
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=is_unbuffered)
    sys.argv[1:] = words
    for module in (subprocess, subprocess_handler):
        module.Popen = Fork  # type: ignore[attr-defined]

    def run_module(_: list[str]) -> int:
        name = str(main)
        if name.endswith(".py"):
            sys.path.insert(0, str(Path(name).parent))
            runpy.run_path(name, run_name="__main__")
        else:
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0

    run_and_exit(run_module if isinstance(main, str) else main, words)
