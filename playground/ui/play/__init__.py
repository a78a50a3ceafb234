"""The playground page: prompt, lanes, live view, lessons."""
