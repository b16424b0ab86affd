"""``python -m rung.cli``."""

import sys

from rung.cli import main

sys.exit(main())
