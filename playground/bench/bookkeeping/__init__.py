"""What strategies cost beside the forwards: CPU time and recorded events, at a large vocabulary and a long context."""
