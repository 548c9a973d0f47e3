"""`python -m rooflax` is the command line."""

from rooflax.cli.main import entry

if __name__ == "__main__":
    entry()
