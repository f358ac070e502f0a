"""``./bazelw run //tools:model_ab``."""

import sys

from tools.model_ab.run import main

if __name__ == "__main__":
    sys.exit(main())
