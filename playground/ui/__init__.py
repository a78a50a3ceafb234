"""The page. Gradio lives here and nowhere else; models are reached through sessions only."""
