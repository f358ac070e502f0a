"""Writes the model of a GGUF file as engines read it.

Usage: save_model.py GGUF_FILE FOLDER
"""

import sys
from pathlib import Path

from tools.smollm2 import model

if __name__ == "__main__":
    model.save(Path(sys.argv[1]), Path(sys.argv[2]))
