"""How the bundled models are trained."""
