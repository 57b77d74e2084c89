"""`python -m ebbtide.cli` is the `ebbtide` command."""

import sys

from ebbtide.cli import main

sys.exit(main())
