"""`python -m te_dynamo` is the command `te-dynamo`."""

from __future__ import annotations

import sys

from te_dynamo.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
