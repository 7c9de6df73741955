"""The command line: arguments to a Config, the verb it asks for, and an exit code for every way it can end.

Nothing here imports jax before the arguments are known to be right and the environment is set.
"""

import errno
import os
import sys
import traceback
from collections.abc import MutableMapping
from typing import IO

from cssm import __version__
from cssm.config import Config, Parsed, UserError, parse_args
from cssm.memory import is_out_of_memory, out_of_memory

BUG, USAGE, OUT_OF_MEMORY, STORAGE, SIGNALLED, INTERRUPTED, UNREAD = 1, 2, 3, 6, 128, 130, 141
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
# JAX calls an NVIDIA GPU cuda.
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


def main(argv: list[str] | None = None) -> int:
    """Run a command line (sys.argv without the program's name unless given); returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:  # `>&-`: the next file to be opened would get its descriptor, and what is printed
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False)
    try:
        try:
            return _dispatch(argv)
        finally:
            sys.stdout.flush()  # here, where a failure can be caught; --help leaves by SystemExit
    except BrokenPipeError as error:
        # Whoever read the output has gone (`| head`). That is no failure of this program: it ends quietly, with the
        # code that a shell gives to a program ended by SIGPIPE.
        if "--debug" in argv:
            traceback.print_exception(error)
        for descriptor in (1, 2):  # Python flushes both once more when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return UNREAD


def _dispatch(argv: list[str]) -> int:
    try:
        parsed = parse_args(argv)
    except UserError as error:
        return _failed(error, error.exit_code, str(error), debug="--debug" in argv)
    config = parsed.config
    set_environment(config, os.environ)
    stream = keep_stdout() if config.headless else None
    try:
        if stream is None and not config.quiet:
            print(_opening(parsed), flush=True)
        return _run(parsed, stream)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost door: every ending becomes an exit code
        code, sentence = explain(error, config)
        if stream is not None and code < SIGNALLED:
            _send_error(stream, code, sentence)
        return _failed(error, code, sentence, debug=config.debug or code == BUG)
    finally:
        if stream is not None:
            stream.close()


def _run(parsed: Parsed, stream: IO[str] | None) -> int:
    if parsed.verb == "devices":
        from cssm.hardware import show_devices

        show_devices(parsed.config, json_stream=stream)
    else:
        from cssm.training import train

        train(parsed.config, typed=parsed.typed, json_stream=stream)
    return 0


def _opening(parsed: Parsed) -> str:
    """The first line on the screen, printed before jax, which takes a second or two, is loaded."""
    config, what = parsed.config, parsed.verb
    if config.resume:
        what = f"resume {config.resume}"
    elif what == "train":
        model = config.arch if config.arch == "baseline" else f"{config.arch} {config.cssm}"
        what = f"{model} on {config.dataset}"
    return f"cssm {__version__}: {what}; loading JAX ..."


def set_environment(config: Config, environ: MutableMapping[str, str]) -> None:
    """Set what jax reads at import. --xla_flags go after the user's own XLA_FLAGS, as the last one wins."""
    xla_flags = f"{environ.get('XLA_FLAGS', '')} {config.xla_flags or ''}".strip()
    if xla_flags:
        environ["XLA_FLAGS"] = xla_flags
    else:
        environ.pop("XLA_FLAGS", None)  # XLA aborts on a blank one
    if config.platform != "auto":
        environ["JAX_PLATFORMS"] = _PLATFORMS[config.platform]
    if config.mem_fraction is not None:
        # The second is the name in newer versions of jax.
        environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = environ["XLA_CLIENT_MEM_FRACTION"] = str(config.mem_fraction)
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # NCCL's diagnostics listen on a fixed port, over which two jobs on one machine would collide.
    environ.setdefault("NCCL_RAS_ENABLE", "0")


def keep_stdout() -> IO[str]:
    """A stream to where file descriptor 1 leads now; whatever is printed there from now on goes to stderr."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return stream


def explain(error: Exception, config: Config) -> tuple[int, str]:
    """The exit code of an error, and the sentence that says what to do about it."""
    origin = type(error).__module__.split(".")[0]
    if isinstance(error, UserError):
        return error.exit_code, str(error)
    if origin == "parallel":
        # That package knows no exit codes; the errors that it defines are the user's mistakes.
        return USAGE, str(error)
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, out_of_memory(config)
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        where = f" at {error.filename}" if error.filename else ""
        ways = "make room or get permission, or choose another --checkpoint_dir or --cache_dir"
        return STORAGE, f"storage failed{where}: {error.strerror}; {ways}"
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    return BUG, f"this is a bug of the program, please report it: {what}"


def _send_error(stream: IO[str], code: int, sentence: str) -> None:
    from cssm.report.events import EventLog

    EventLog(None, stream).write("error", {"exit_code": code, "message": sentence})


def _failed(error: Exception, code: int, sentence: str, debug: bool) -> int:
    sys.stdout.flush()  # what came before is read before, where both lead to one place
    if debug:
        traceback.print_exception(error)
    label = "" if code > SIGNALLED else "error: "  # to be stopped is no error
    print(f"{label}{sentence}".replace("\n", " "), file=sys.stderr, flush=True)
    return code
