"""What a name or a path holds, and whether it may be read: files, forms, limits, adapters."""
