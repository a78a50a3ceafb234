"""The KV cache of a lane and its memory."""
