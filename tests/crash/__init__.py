"""Every power cut, exhaustively; ``python -m tests.crash`` runs all of it and prints how much there was."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for disk_model, also without pytest
