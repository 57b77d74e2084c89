"""`python -m ebbtide._cli` is the `ebbtide` command."""

import sys

from ebbtide._cli import main

sys.exit(main())
