"""The same program as ``python -m flashverify.abba``, from the build tree.

In a folder of its own: Python puts a program's folder first in the import path.
"""

import sys

from flashverify.abba.run import main

if __name__ == "__main__":
    sys.exit(main())
