"""``python -m pcdlab``: the command line without an installed script."""

from pcdlab.cli import main

if __name__ == "__main__":
    main()
