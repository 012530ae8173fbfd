"""`python -m rootlace.cli`: the console script."""

from rootlace.cli import main

if __name__ == "__main__":
    main()
