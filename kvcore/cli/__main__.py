"""`python -m kvcore.cli` is `kvcore`."""

import sys

from kvcore.cli import main

sys.exit(main())
