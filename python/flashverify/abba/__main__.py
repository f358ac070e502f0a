"""``python -m flashverify.abba``."""

import sys

from flashverify.abba.run import main

if __name__ == "__main__":
    sys.exit(main())
