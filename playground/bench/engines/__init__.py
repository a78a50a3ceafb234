"""Two grammar engines side by side, llguidance and XGrammar: the same grammar, mask by mask and time by time.

Both compile every grammar. Random writers follow the masks of either engine, and at every position of their texts both
masks are computed, timed and compared token by token; instances that come with a schema are matched with both. XGrammar
is not installed with the project. Dong et al. 2024, arXiv 2411.15100.
"""
