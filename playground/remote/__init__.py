"""Lanes that a server generates: any server with the OpenAI completions interface."""
