"""The page. Only this package imports Gradio; models are used through sessions only."""
