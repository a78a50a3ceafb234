"""What several decoders of masked canvases share."""
