"""The command line: one thin file for each subcommand, which parses, calls a layer and prints."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 and the number of the signal."""
