"""`python -m asyncmaml` is the command `asyncmaml`."""

from asyncmaml.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
