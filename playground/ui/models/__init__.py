"""Which models the page offers, and the sheet that loads one."""
