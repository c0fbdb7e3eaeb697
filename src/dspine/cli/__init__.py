"""The command line: one thin file for each subcommand, which parses, calls a layer and prints."""
