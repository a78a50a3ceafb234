"""The player of runs: frames, styles and scripts, and a run as a page that plays alone. No gradio, no torch."""
