"""Runs the command line as `python -m onepass.cli`."""

import sys

from .main import main

sys.exit(main())
