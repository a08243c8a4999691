"""The command line. Its modules import nothing heavy until a command runs."""
