"""One lane under many seeds, or many values of a knob."""
