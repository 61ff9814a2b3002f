"""`python -m tieroff` is the command line."""

from tieroff.cli import main

if __name__ == "__main__":
    main()
