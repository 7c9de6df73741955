"""The command line: arguments to a Config, the verb it asks for, and an exit code for every way it can end.

Nothing here imports jax before the arguments are known to be right and the environment is set. For a job of several
processes this program is its own parent: it starts the same command again, as workers, and never imports jax.
"""

import errno
import os
import shlex
import signal
import sys
import traceback
from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import replace
from importlib.metadata import version
from typing import IO, NoReturn

from cssm import __version__
from cssm.config import OF_A_RUN, TRAINING, Config, Parsed, UserError, parse_args
from cssm.memory import is_out_of_memory, out_of_memory, reserve
from parallel.find import find_job
from parallel.job import Job, JobError, join, leave
from parallel.launch import LOST_LABEL, LOST_PEER, ORDERLY, Place, Worker, enter_worker, run
from parallel.places import local_places, place_in

BUG, USAGE, OUT_OF_MEMORY, DEVICES, STORAGE, SIGNALLED, INTERRUPTED, UNREAD = 1, 2, 3, 4, 6, 128, 130, 141
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)
_STORAGE_ERRORS += (errno.EIO, errno.EFBIG, errno.ESTALE, errno.ENAMETOOLONG)
_PLACES_OF_A_RUN = "--checkpoint_dir or --cache_dir"
_NEEDED = ("flax", "jax", "jaxlib", "numpy", "optax", "orbax", "rich", "sklearn")
# XLA's flags, and the jaxlib that knows them first: an earlier one ends the process at a flag it does not know.
# With several GPUs XLA's latency-hiding scheduler puts gradients of weights off to the end of a step, to have something
# to do beside the all-reduces, and keeps all that they are made of: compiled for two, a step of the small preset with
# --remat took 104 GB where it takes 20 without. It hid no all-reduce either.
# An allocator that is partitioned gives small arrays a part of the block that a step's temporary memory has just left,
# sooner than memory past it: a step that takes more than half of the memory then finds no block, at any later step.
XLA_FLAGS = (
    ("--xla_gpu_enable_latency_hiding_scheduler=false", (0, 10)),
    ("--xla_gpu_enable_allocator_spatial_partitioning=false", (0, 11)),
)
# JAX calls an NVIDIA GPU cuda.
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


def main(argv: list[str] | None = None) -> int:
    """Run a command line (sys.argv without the program's name unless given); returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:  # `>&-`: the next file to be opened would get its descriptor, and what is printed
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False)
    worker = enter_worker(os.environ)
    try:
        try:
            code = _dispatch(argv, worker)
        finally:
            sys.stdout.flush()  # here, where a failure can be caught; --help leaves by SystemExit
    except BrokenPipeError as error:
        # Whoever read the output has gone (`| head`). That is no failure of this program: it ends quietly, with the
        # code that a shell gives to a program ended by SIGPIPE.
        if "--debug" in argv:
            traceback.print_exception(error)
        for descriptor in (1, 2):  # Python flushes both once more when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        code = UNREAD
    if worker is not None:
        return _part(code)
    # A device may hang, and jax would wait for it; a program may be compiling still, and XLA would crash.
    if code in (DEVICES, *(SIGNALLED + number for number in (signal.SIGINT, signal.SIGTERM))) and "jax" in sys.modules:
        _end_at_once(code)
    return code


def _dispatch(argv: list[str], worker: Worker | None) -> int:
    try:
        parsed = parse_args(argv)
    except UserError as error:
        return _failed(error, error.exit_code, str(error), debug="--debug" in argv)
    if worker and worker.divided:  # it sees its own devices, and indices into all of them would mean others
        parsed = _without(parsed, "gpus", "num_devices")
    config = parsed.config
    # A program for every platform is made on the one that all machines have.
    set_environment(replace(config, platform="cpu") if parsed.verb == "export" else config, os.environ)
    with ExitStack() as stack:
        # A worker has Gloo in it, which prints too.
        kept = keep_stdout() if config.headless or worker else None
        if kept:
            stack.callback(_close, kept)
        stream = kept if config.headless else None
        if kept and not stream:
            stack.enter_context(redirect_stdout(kept))
        try:
            if parsed.verb == "compare":
                from cssm.compare import compare

                compare(parsed.paths, stream, config.output)
                return 0
            if parsed.verb == "prepare":
                from cssm.prepare import prepare

                prepare(config, parsed.typed, stream)
                return 0
            if places := [] if worker else _places(config):
                if parsed.verb not in ("train", "devices"):
                    kind = places[0].job.kind
                    raise JobError(
                        f"{parsed.verb} uses all devices from one process, and this is one of a job ({kind}): start it "
                        "alone"
                    )
                return _start(argv, parsed, places, stream)
            return _work(argv, parsed, worker, stream)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            print("stopped by Ctrl-C", file=sys.stderr, flush=True)
            return _end_at_once(INTERRUPTED) if worker else INTERRUPTED
        except Exception as error:  # noqa: BLE001 - the outermost door: every ending becomes an exit code
            code, sentence = explain(error, config, several=worker is not None)
            if stream is not None and code < SIGNALLED and code != LOST_PEER:
                # Where the stream is what failed, or the library that writes to it is missing, stderr alone can tell.
                with suppress(OSError, ModuleNotFoundError):
                    _send_error(stream, code, sentence)
            return _failed(error, code, sentence, debug=config.debug or code == BUG)


def _without(parsed: Parsed, *names: str) -> Parsed:
    typed = {name: value for name, value in parsed.typed.items() if name not in names}
    return replace(parsed, config=replace(parsed.config, **dict.fromkeys(names)), typed=typed)


def _places(config: Config) -> list[Place]:
    """The processes to start here: those of --nproc_per_node or, as a worker, this one of a job; none without a job."""
    wanted = config.nproc_per_node or ("auto" if config.multi_gpu == "ddp" else None)
    devices = {"gpus": config.gpus, "num_devices": config.num_devices}
    job = find_job(
        os.environ,
        coordinator_address=config.coordinator_address,
        coordinator_port=config.coordinator_port,
        num_processes=config.num_processes,
        process_id=config.process_id,
    )
    if job is not None:
        _check_fit(config, job)
        return [place_in(job, os.environ, **devices)]
    if wanted is not None:
        return local_places(wanted, os.environ, port=config.coordinator_port, **devices)
    if config.coordinator_port is not None and config.num_processes is None:
        raise JobError(f"--coordinator_port {config.coordinator_port} is for several processes, and this is one alone")
    return []


def _check_fit(config: Config, job: Job) -> None:
    """As rules.py does for the flags, for a job that the environment tells of."""
    alone = {"--multi_gpu off": config.multi_gpu == "off", "--sync_backend cpu": config.sync_backend == "cpu"}
    alone[f"--nproc_per_node {config.nproc_per_node}"] = config.nproc_per_node not in (None, "1")
    for flag in (flag for flag, given in alone.items() if given):
        raise JobError(
            f"{flag} is for a process started alone, and this is one of {job.num_processes} ({job.kind}): leave it out"
        )


def _start(argv: Sequence[str], parsed: Parsed, places: Sequence[Place], stream: IO[str] | None) -> int:
    """Start this command again, as workers, and see them through."""
    config, job = parsed.config, places[0].job
    if stream is None and not config.quiet and job.process_id == 0:
        print(_opening(parsed, f"{job.num_processes} processes, "), flush=True)
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]  # the interpreter's options and the script
    command = [sys.executable, *before, *argv]
    return run(command, places, config.heartbeat_timeout, verbose=config.debug, stdout=stream)


def _work(argv: Sequence[str], parsed: Parsed, worker: Worker | None, stream: IO[str] | None) -> int:
    if worker is None:
        if stream is None and not parsed.config.quiet:
            print(_opening(parsed), flush=True)
    else:
        join(worker.job, parsed.config.heartbeat_timeout)
    if parsed.verb == "devices":
        from cssm.hardware import show_devices

        show_devices(parsed.config, json_stream=stream)
    elif parsed.verb == "bench":
        from cssm.bench import bench

        bench(parsed.config, shlex.join(["main.py", *argv]), stream)
    elif parsed.verb in OF_A_RUN:
        _use(parsed, stream)
    else:
        if not parsed.config.dry_run:
            reserve(parsed.config)
        from cssm.training import train

        train(parsed.config, typed=parsed.typed, json_stream=stream)
    return 0


def _use(parsed: Parsed, stream: IO[str] | None) -> None:
    """What is done with a trained model."""
    if parsed.verb == "eval":
        from cssm.inference.evaluate import evaluate

        evaluate(parsed.config, parsed.typed, stream)
    elif parsed.verb == "predict":
        from cssm.inference.predict import predict

        predict(parsed.config, parsed.typed, parsed.paths, stream)
    else:
        from cssm.inference.export import export

        export(parsed.config, stream)


def _part(code: int) -> int:
    """Leave the job, where all processes end like this one; otherwise end at once, as the others may never answer."""
    if code in ORDERLY:
        try:
            leave()
        except RuntimeError as error:
            code = _failed(error, LOST_PEER, f"at the end: {error}", debug=False)
    return code if code in ORDERLY else _end_at_once(code)


def _end_at_once(code: int) -> NoReturn:
    """Without what Python and jax do at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _opening(parsed: Parsed, processes: str = "") -> str:
    """The first line on the screen, and notes on what was typed; printed before jax is loaded, which takes seconds."""
    config, what = parsed.config, parsed.verb
    if config.resume:
        what = f"resume {config.resume}"
    elif what in OF_A_RUN:
        what = f"{what} of {config.checkpoint}"
    elif what in TRAINING:
        model = " ".join(filter(None, (config.arch, config.cell)))
        what = f"{'' if what == 'train' else f'{what} of '}{model} on {config.dataset}"
    what = f"dry run, {what}" if config.dry_run else what
    notes = "".join(f"\nnote: {note}" for note in parsed.notes)
    return f"cssm {__version__}: {what}; {processes}loading JAX ...{notes}"


def set_environment(config: Config, environ: MutableMapping[str, str]) -> None:
    """Set what jax reads at import. XLA's flags: our own, those of XLA_FLAGS, --xla_flags; the last one wins."""
    flags = [*environ.get("XLA_FLAGS", "").split(), *config.wanted_xla_flags]
    jaxlib = tuple(int(number) for number in version("jaxlib").split(".")[:2])
    own = [flag for flag, since in XLA_FLAGS if jaxlib >= since and flag not in flags]
    environ["XLA_FLAGS"] = " ".join([*own, *flags])
    if config.platform != "auto":
        environ["JAX_PLATFORMS"] = _PLATFORMS[config.platform]
    if config.mem_fraction is not None:
        environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # its old name, beside which jax refuses it
        environ["XLA_CLIENT_MEM_FRACTION"] = str(config.mem_fraction)
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # NCCL's diagnostics listen on a fixed port, over which two jobs on one machine would collide.
    environ.setdefault("NCCL_RAS_ENABLE", "0")


def keep_stdout() -> IO[str]:
    """A stream to where file descriptor 1 leads now; whatever is printed there from now on goes to stderr."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return stream


def _close(stream: IO[str]) -> None:
    """Each line was flushed as it was written, and a failure to write it has been told."""
    with suppress(OSError):
        stream.close()


def explain(error: Exception, config: Config, several: bool = False) -> tuple[int, str]:
    """The exit code of an error, and the sentence that says what to do about it; several: in a job of processes."""
    origin = type(error).__module__.split(".")[0]
    if isinstance(error, UserError):
        return error.exit_code, str(error)
    if origin == "parallel":
        # The errors that it defines: a ValueError is the user's mistake; otherwise devices or processes failed.
        return getattr(error, "exit_code", DEVICES if isinstance(error, RuntimeError) else USAGE), str(error)
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, out_of_memory(config, error)
    if several and (origin in ("jax", "jaxlib") or "Gloo" in str(error)):  # Gloo's errors come as ValueError
        return LOST_PEER, str(error).splitlines()[0]
    if isinstance(error, ModuleNotFoundError) and error.name in _NEEDED:
        return USAGE, f"{error.name} is not installed here: type `make train`, or install as README.md says"
    if isinstance(error, OSError) and (error.errno in _STORAGE_ERRORS or _place(error, config)):
        where = f" at {error.filename}" if error.filename else ""
        ways = f"make room or get permission, or choose another {_place(error, config) or _PLACES_OF_A_RUN}"
        return STORAGE, f"storage failed{where}: {error.strerror}; {ways}"
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    return BUG, f"this is a bug of the program, please report it: {what}"


def _place(error: OSError, config: Config) -> str | None:
    """The flag whose file or folder cannot be made: the error is about it, or a folder above. A file that is missing
    anywhere else is a bug.
    """
    path = os.path.abspath(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    for flag in ("output", "explain", "checkpoint_dir", "cache_dir"):
        given = getattr(config, flag)
        if path and given is not None:
            place = os.path.abspath(given)
            if path in (place, f"{place}.partial") or place.startswith(path + os.sep):
                return f"--{flag}"
    return None


def _send_error(stream: IO[str], code: int, sentence: str) -> None:
    from cssm.report.events import EventLog

    EventLog(None, stream).write("error", {"exit_code": code, "message": sentence})


def _failed(error: Exception, code: int, sentence: str, debug: bool) -> int:
    sys.stdout.flush()  # what came before is read before, where both lead to one place
    if debug:
        traceback.print_exception(error)
    label = "" if code > SIGNALLED else "error: "  # to be stopped is no error
    if code == LOST_PEER:  # the parent says what became of the others
        label = LOST_LABEL
    print(f"{label}{sentence}".replace("\n", " "), file=sys.stderr, flush=True)
    return code
