"""Runs the command line as `python -m onepass`."""

import sys

from onepass.cli.main import main

sys.exit(main())
