# PYTHON_ARGCOMPLETE_OK
"""`python -m playground serve | list | run | compare | replay | bench | study | fit | variant | space`"""
import sys

from playground.cli import main

sys.exit(main())
