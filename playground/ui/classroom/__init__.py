"""A class: a presenter, and followers who see its runs."""
