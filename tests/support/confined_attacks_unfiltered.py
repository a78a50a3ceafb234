"""The same work where libseccomp is not installed."""
from __future__ import annotations

import sys

from support.confined_attacks import BOUNDS as BOUNDS
from support.confined_attacks import answer as answer
from support.confined_attacks import learn as learn
from support.confined_attacks import warm as warm

sys.modules["pyseccomp"] = None
