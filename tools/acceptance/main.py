"""``./bazelw run //tools:acceptance``."""

import sys

from tools.acceptance.run import main

if __name__ == "__main__":
    sys.exit(main())
