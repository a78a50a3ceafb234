"""The cache policies side by side: what they remember, what memory they really free, and what a step under them takes.
"""
