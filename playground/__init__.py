"""The product around the strategies."""
