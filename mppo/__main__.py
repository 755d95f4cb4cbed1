"""`python -m mppo` and the `mppo` command."""

import sys

from mppo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
