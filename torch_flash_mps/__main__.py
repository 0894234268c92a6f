"""``python -m torch_flash_mps doctor | selftest | bench``: see docs/command_line.md."""

from __future__ import annotations

import argparse
import sys

from torch_flash_mps.cli import bench, doctor, selftest


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_flash_mps",
        description="Fused attention on this machine. On Linux, which has no Apple GPU, every "
        "command runs on the simulated device, and says so.",
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in (doctor, selftest, bench):
        about = (command.__doc__ or "").partition("\n")[0]
        subparser = commands.add_parser(
            command.__name__.rpartition(".")[2], help=about, description=about)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
