"""The command `fusewire`, also `python -m fusewire`: run, info, timeline, bench."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fusewire", description="Fused, any-order collectives for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fusewire {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="start a training script on several ranks of this host (torchrun underneath)",
        usage="fusewire run -n N [--max-restarts R] [--] script.py [args...]\n"
        "       fusewire run -n N [--max-restarts R] -m package.module [args...]",
    )
    run.add_argument("-n", "--ranks", type=_positive, required=True, metavar="N", help="number of ranks")
    run.add_argument("--max-restarts", type=int, default=0, metavar="R", help="restarts after a failure (default 0)")
    run.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as in python -m")
    run.add_argument("script", help="the script, or with -m the module, that every rank runs")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    run.set_defaults(function=_run)

    info = commands.add_parser("info", help="what is built, what was found, and why a thing is off")
    info.set_defaults(function=_info)

    timeline = commands.add_parser("timeline", help="join the timelines of several ranks")
    actions = timeline.add_subparsers(dest="action", required=True, metavar="ACTION")
    merge = actions.add_parser("merge", help="one file with each rank as a process of its own")
    merge.add_argument("output", metavar="OUT", help="the file to write")
    merge.add_argument("inputs", nargs="+", metavar="TIMELINE", help="a file, a directory (its *.json) or a pattern")
    merge.set_defaults(function=_merge_timelines)

    # The benchmark has its own parser, which knows its --help too.
    bench = commands.add_parser("bench", help="measure Fusewire beside its peers", add_help=False)
    bench.set_defaults(function=None)

    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        from .bench import main as bench_main

        return bench_main(arguments[1:])
    options = parser.parse_args(arguments)
    return options.function(options)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _run(options: argparse.Namespace) -> int:
    from ._run import threads_per_rank

    if "OMP_NUM_THREADS" not in os.environ:
        threads = threads_per_rank(options.ranks)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        print(
            f"fusewire run: {options.ranks} ranks share this host's cores, so OMP_NUM_THREADS={threads} for each; "
            "set it to choose yourself.",
            file=sys.stderr,
            flush=True,
        )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command += [f"--max-restarts={options.max_restarts}"]
    command += ["--module"] if options.module else []
    command += [options.script, *options.arguments]
    os.execv(sys.executable, command)  # signals and the exit status are torchrun's own


def _merge_timelines(options: argparse.Namespace) -> int:
    from ._timeline import merge

    try:
        count = merge(options.output, options.inputs)
    except (OSError, ValueError) as error:
        print(f"fusewire timeline merge: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {count} timeline{'' if count == 1 else 's'}; open it at https://ui.perfetto.dev")
    return 0


def _info(options: argparse.Namespace) -> int:
    from ._info import print_info

    return print_info()
