"""`python -m playground list | run | compare | replay | bench`"""
import sys

from playground.shell import main

sys.exit(main())
