"""``python -m rung``: the command line."""

import sys

from rung.cli import main

sys.exit(main())
