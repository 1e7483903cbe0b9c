"""The command line: commands, their options and what they print."""
